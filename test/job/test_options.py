"""The option table and what is made of it."""

import re
from pathlib import Path

import pytest

from ringtrain.options import table

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "options.md"
NAME = re.compile(r"\bRINGTRAIN_[A-Z][A-Z_]*[A-Z]\b")


def test_the_document_is_current():
    assert table.markdown() in DOCUMENT.read_text(), "run `make docs`"


@pytest.mark.parametrize(("name", "value"), [("kv_outbox_mb", "8"), ("simd", "scalar")])
def test_options_of_developers_are_not_on_the_page_and_can_be_set(name, value):
    assert f"`{name}`" not in DOCUMENT.read_text()
    assert table.resolve({name: value}, {})[name] == value
    assert table.resolve({}, {table.environment_name(name): value})[name] == value


def test_every_default_is_allowed():
    resolved = table.resolve({}, environ={})
    assert set(resolved) == {option.name for option in table.TABLE}
    assert table.resolve(resolved, environ={}) == resolved


@pytest.mark.parametrize("name", ["fusion_treshold_mb", "FUSION_THRESHOLD_MB", "fusion_threshold_kb"])
def test_an_unknown_option_is_told_with_the_nearest_one(name):
    with pytest.raises(TypeError, match=rf"no option '{name}'; did you mean 'fusion_threshold_mb'\?$"):
        table.resolve({name: 3}, {})


def test_the_beginning_of_an_option_is_told_with_those_that_begin_so():
    with pytest.raises(
        TypeError, match=r"no option 'stall'; did you mean 'stall_shutdown_time_s' or 'stall_warning_time_s'\?$"
    ):
        table.resolve({"stall": 3}, {})


def test_an_unknown_option_like_no_other_is_told_with_all():
    with pytest.raises(TypeError, match=r"no option 'colour'; the options are allreduce_algorithm, .*wire_format"):
        table.resolve({"colour": 3}, {})


@pytest.mark.parametrize("name", ["RINGTRAIN_CACHE_CAPACTIY", "RINGTRAIN_cache_capacity", "ringtrain_cache_capacity"])
def test_a_misspelt_variable_is_told_with_the_right_one(name):
    assert table.misspelt({name: "5", "RINGTRAIN_CACHE_CAPACITY": "5"}) == [
        f"{name} has no effect: there is no such option; did you mean RINGTRAIN_CACHE_CAPACITY?"
    ]


@pytest.mark.parametrize("name", table.GONE)
def test_an_option_that_is_gone_is_taken_and_says_why(name):
    assert table.gone([name])[0].startswith(f"the option {name} has no effect any more: TCP ")
    settings = table.resolve({name: 5}, {})
    assert table.differing({name: 7}, settings) == []
    assert table.misspelt({f"RINGTRAIN_{name.upper()}": "5"})[0].startswith(
        f"RINGTRAIN_{name.upper()} has no effect any more: TCP "
    )


def test_no_variable_of_ringtrain_or_of_somebody_else_counts_as_misspelt():
    root = Path(table.__file__).parents[2]
    sources = [
        *root.glob("ringtrain/**/*.py"),
        *root.glob("csrc/**/*.cc"),
        *root.glob("test/**/*.py"),
        root / "setup.py",
    ]
    own = {
        name for source in sources if not source.name.startswith("test_") for name in NAME.findall(source.read_text())
    }
    assert {"RINGTRAIN_RENDEZVOUS", "RINGTRAIN_MEMBER", "RINGTRAIN_SECRET_FILE"} <= own
    assert table.misspelt(dict.fromkeys([*own, "RINGTRAIN_HOME", "CACHE_CAPACTIY", "RINGTRAIN"], "1")) == []


def test_the_order_of_precedence():
    environ = {"RINGTRAIN_CACHE_CAPACITY": "5", "HOROVOD_CACHE_CAPACITY": "6"}
    assert table.resolve({"cache_capacity": 4}, environ)["cache_capacity"] == "4"
    assert table.resolve({}, environ)["cache_capacity"] == "5"
    del environ["RINGTRAIN_CACHE_CAPACITY"]
    assert float(table.resolve({}, environ)["cache_capacity"]) == 6


def test_horovod_counts_bytes_where_we_count_megabytes():
    environ = {"HOROVOD_FUSION_THRESHOLD": str(64 * 1024 * 1024)}
    assert float(table.resolve({}, environ)["fusion_threshold_mb"]) == 64


@pytest.mark.parametrize("text", ["1", "1e3", "0x10", "t.json"])
def test_a_path_of_horovod_is_no_number(text):
    assert table.resolve({}, {"HOROVOD_TIMELINE": text})["timeline_filename"] == text


@pytest.mark.parametrize("variable", ["RINGTRAIN_AUTOTUNE", "HOROVOD_AUTOTUNE"])
@pytest.mark.parametrize(
    ("words", "switch"),
    [(["1", "true", "True", "ON", "yes", "2", " 1"], "on"), (["0", "false", "FALSE", "off", "no", "-1"], "off")],
)
def test_there_are_many_words_for_on_and_off(variable, words, switch):
    for word in words:
        assert table.resolve({}, {variable: word})["autotune"] == switch
    assert table.resolve({"autotune": switch == "on"}, {})["autotune"] == switch
    with pytest.raises(ValueError, match=f"option autotune must be one of off on, not maybe .*{variable}"):
        table.resolve({}, {variable: "maybe"})


def test_dynamic_is_no_name_of_a_timeline_in_horovods_variable():
    assert table.resolve({}, {"HOROVOD_TIMELINE": "DYNAMIC"})["timeline_filename"] == ""
    assert table.resolve({"timeline_filename": "DYNAMIC"}, {})["timeline_filename"] == "DYNAMIC"


@pytest.mark.parametrize("option", table.TABLE, ids=lambda option: option.name)
def test_every_range_has_its_ends(option):
    if option.type == "text":
        inside, outside = ["", "anything"], []
    elif option.type == "steps":
        inside, outside = ["", "5", "0-3", "10-10"], ["foo", "3-", "4-3", "-1", "1-2-3", " 1", "1" * 30]
    elif option.type == "rates":
        inside, outside = ["off", "auto", "1", "0.001,1000000,2.5"], ["", "on", "0.0001", "1000001", "1,", "1,auto"]
    elif option.type == "choice":
        inside, outside = option.choices, ["", "none of them"]
    else:
        inside, outside = [option.minimum, option.maximum], [option.minimum - 1, option.maximum * 2, "nan", "1x"]
    for value in inside:
        table.resolve({option.name: value}, environ={})
    for value in outside:
        with pytest.raises(ValueError, match=f"option {option.name} must be"):
            table.resolve({option.name: value}, environ={})

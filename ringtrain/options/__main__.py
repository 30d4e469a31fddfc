"""`python -m ringtrain.options`: the page docs/options.md, made of the table in the core."""

from ringtrain.options import table

print("# Options\n\nGenerated from the table in the core by `make docs`.\n")
print((table.__doc__ or "").split("\n\n", 1)[1])
print(table.markdown(), end="")

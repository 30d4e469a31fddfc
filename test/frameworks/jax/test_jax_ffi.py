"""The declarations of XLA's foreign function interface agree with jaxlib's own header."""

import subprocess
import sys
from pathlib import Path

from harness.frameworks import on_demand

jax = on_demand("jax")
ffi = on_demand("ringtrain.jax.ffi")

ROOT = Path(__file__).resolve().parents[3]

# Ours, XLA's, and the fields of both.
STRUCTS = {
    ("Extension", "XLA_FFI_Extension_Base"): {"size": "struct_size", "type": "type", "next": "next"},
    ("Version", "XLA_FFI_Api_Version"): {"major": "major_version", "minor": "minor_version"},
    ("Metadata", "XLA_FFI_Metadata"): {"version": "api_version", "traits": "traits"},
    ("MetadataExtension", "XLA_FFI_Metadata_Extension"): {"metadata": "metadata"},
    ("Buffer", "XLA_FFI_Buffer"): {"element": "dtype", "data": "data", "rank": "rank", "dimensions": "dims"},
    ("Bytes", "XLA_FFI_ByteSpan"): {"begin": "ptr", "length": "len"},
    ("Scalar", "XLA_FFI_Scalar"): {"element": "dtype", "value": "value"},
    ("Arguments", "XLA_FFI_Args"): {"count": "size", "types": "types", "items": "args"},
    ("Arguments", "XLA_FFI_Rets"): {"count": "size", "types": "types", "items": "rets"},
    ("Attributes", "XLA_FFI_Attrs"): {"count": "size", "types": "types", "names": "names", "items": "attrs"},
    ("FailureCreate", "XLA_FFI_Error_Create_Args"): {"message": "message", "code": "errc"},
    ("FutureCreate", "XLA_FFI_Future_Create_Args"): {"future": "future"},
    ("FutureSetAvailable", "XLA_FFI_Future_SetAvailable_Args"): {"future": "future"},
    ("FutureSetError", "XLA_FFI_Future_SetError_Args"): {"future": "future", "failure": "error"},
    ("Api", "XLA_FFI_Api"): {
        "version": "api_version",
        "create_failure": "XLA_FFI_Error_Create",
        "create_future": "XLA_FFI_Future_Create",
        "set_available": "XLA_FFI_Future_SetAvailable",
        "set_error": "XLA_FFI_Future_SetError",
    },
    ("CallFrame", "XLA_FFI_CallFrame"): {
        "extension": "extension_start",
        "api": "api",
        "stage": "stage",
        "arguments": "args",
        "results": "rets",
        "attributes": "attrs",
        "future": "future",
    },
}
# Where XLA has it.
NEW_STRUCTS = {
    ("DeviceOrdinalGet", "XLA_FFI_DeviceOrdinal_Get_Args"): {"context": "ctx", "ordinal": "device_ordinal"},
    ("Api", "XLA_FFI_Api"): {"get_device_ordinal": "XLA_FFI_DeviceOrdinal_Get"},
}
ELEMENTS = {
    "boolean": "PRED",
    "int8": "S8",
    "int64": "S64",
    "uint16": "U16",
    "uint32": "U32",
    "uint64": "U64",
    "float16": "F16",
    "float32": "F32",
    "float64": "F64",
    "complex64": "C64",
    "bfloat16": "BF16",
    "complex128": "C128",
}


def checks():
    header = ffi.header().read_text()
    new = NEW_STRUCTS if "XLA_FFI_DeviceOrdinal_Get_Args" in header else {}
    for (own, theirs), fields in (*STRUCTS.items(), *new.items()):
        if theirs == "XLA_FFI_Extension_Base" and theirs not in header:  # its name since jaxlib 0.12
            theirs = "XLA_FFI_InternalExtension"
        for field, name in fields.items():
            yield f"offsetof(ringtrain::xla::{own}, {field}) == offsetof({theirs}, {name})"
    for own, name in ELEMENTS.items():
        yield f"static_cast<int>(ringtrain::xla::Element::{own}) == XLA_FFI_DataType_{name}"
    yield "ringtrain::xla::CallFrame::kExecute == XLA_FFI_ExecutionStage_EXECUTE"
    yield "ringtrain::xla::Extension::kMetadata == XLA_FFI_Extension_Metadata"
    for code in ("INVALID_ARGUMENT", "DEADLINE_EXCEEDED", "ABORTED", "INTERNAL", "UNAVAILABLE"):
        yield f"static_cast<int>(ringtrain::xla::Code::{code.lower()}) == XLA_FFI_Error_Code_{code}"


def test_every_field_lies_where_jaxlib_has_it():
    lines = ["#include <cstddef>", '#include "xla/ffi.h"', '#include "xla/ffi/api/c_api.h"']
    lines += [f'static_assert({check}, "");' for check in checks()]
    done = subprocess.run(
        ["g++", "-std=c++17", "-fsyntax-only", f"-I{ROOT / 'csrc'}", f"-I{ffi.header().parents[3]}", "-x", "c++", "-"],
        input="\n".join(lines),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr


def test_importing_ringtrain_does_not_import_jax():
    code = "import sys, ringtrain; print(sorted({'jax', 'jaxlib', 'optax'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[]\n"

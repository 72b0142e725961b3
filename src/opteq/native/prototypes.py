"""What the functions of the C sources take and return."""

from __future__ import annotations

import ctypes

# One letter an argument: a pointer, a number of things, an int, a double, a float.
_KINDS = {
    "p": ctypes.c_void_p,
    "n": ctypes.c_size_t,
    "i": ctypes.c_int,
    "d": ctypes.c_double,
    "f": ctypes.c_float,
}


def _checked(failed: int) -> None:
    if failed:
        raise MemoryError("There is no memory for what compiled code keeps meanwhile; use smaller batches.")


# The arguments of each and what is returned.
_PROTOTYPES = {
    "winograd_kernels": ("ppnnii", None),
    "winograd_convolve": ("pppnnnnnni", _checked),
    "winograd_gradient": ("ppppnnnnnnni", _checked),
    "packed_pack": ("pnnpnni", None),
    "packed_multiply": ("pnppnnni", None),
    "packed_gram": ("pnppnni", None),
    "packed_each": ("pnnnpnnnpnnnnfi", _checked),
    "forces": ("pppppnnnnnni", _checked),
    "rows_observe": ("pnpnpnpnnpi", _checked),
    "rows_hold": ("pnpnppnni", None),
    "rows_mix": ("ppppppppnnnniddi", _checked),
    "rows_judge": ("ppppppnndddi", None),
    "rows_descend": ("ppppppppppnni", None),
    "rows_turn": ("pppppdppnni", ctypes.c_size_t),
}


def declare(library: ctypes.CDLL) -> ctypes.CDLL:
    """`library`, which from now on knows what its functions take.

    Raises:
        AttributeError: if one of them is missing, so that it is another library.
    """
    for name, (arguments, result) in _PROTOTYPES.items():
        function = getattr(library, f"opteq_{name}")
        function.argtypes = [_KINDS[letter] for letter in arguments]
        function.restype = result
    return library

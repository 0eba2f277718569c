"""The Reed-Solomon erasure code: ISA-L does the arithmetic, this file makes the matrices and passes the buffers.

The code is systematic over GF(2^8): fragment i < k is the i-th part of the data, and fragment k + j is parity. The parity rows
are a Cauchy matrix, so any k of the k + m fragments give the data back. ISA-L comes with the wheel of pyeclib or with the
system.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import functools
import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from ckpt.storage.base.errors import InvalidArgument, StoreError
from ckpt.storage.base.forks import fork_safe_lock

ByteArray = np.ndarray
"""A contiguous one-dimensional array of uint8."""


class ErasureCode:
    """The code of `data` data fragments and `parity` parity fragments. Safe to use from many threads."""

    def __init__(self, data: int, parity: int) -> None:
        if not (data >= 1 and parity >= 0 and data + parity <= 32):
            raise InvalidArgument(f"an erasure code of {data}+{parity} is not possible: use 1 to 32 fragments in all")
        self.data = data
        self.parity = parity
        self._isal = _load_isal()
        self._matrix = np.zeros((data + parity, data), np.uint8)
        self._isal.gf_gen_cauchy1_matrix(_address(self._matrix), data + parity, data)
        self._encode_tables = self._make_tables(self._matrix[data:])
        self._decode_tables_cache: dict[tuple[tuple[int, ...], tuple[int, ...]], ByteArray] = {}
        self._lock = fork_safe_lock()  # a code is kept until the process ends
        """Guards `_decode_tables_cache`."""

    def encode(self, data_fragments: Sequence[ByteArray], parity_fragments: Sequence[ByteArray]) -> None:
        """Fill the parity fragments from the data fragments. All have the same length."""
        self._multiply(self._encode_tables, data_fragments, parity_fragments)

    def reconstruct(self, fragments: Mapping[int, ByteArray], missing_fragments: Mapping[int, ByteArray]) -> None:
        """Fill the arrays of `missing_fragments` from any k other fragments, data or parity. All have the same length.

        Both mappings are by fragment number. Raises StoreError if fewer than k fragments are given.
        """
        have = tuple(sorted(fragments))[: self.data]
        if len(have) < self.data:
            raise StoreError(f"{len(fragments)} fragments are left of {self.data}+{self.parity}; {self.data} are needed")
        missing = tuple(missing_fragments)
        tables = self._decode_tables(have, missing)
        self._multiply(tables, [fragments[i] for i in have], [missing_fragments[i] for i in missing])

    def _decode_tables(self, have: tuple[int, ...], missing: tuple[int, ...]) -> ByteArray:
        """Return the tables that make the missing fragments from the present ones, both given by number."""
        with self._lock:
            found = self._decode_tables_cache.get((have, missing))
        if found is None:
            rows = np.ascontiguousarray(self._matrix[list(have)])
            inverse = np.zeros_like(rows)
            if self._isal.gf_invert_matrix(_address(rows), _address(inverse), self.data):
                raise StoreError(f"fragments {have} of {self.data}+{self.parity} can't be decoded")  # never for a Cauchy matrix
            coefficients = np.zeros((len(missing), self.data), np.uint8)
            for row, fragment in enumerate(missing):
                for column in range(self.data):
                    total = 0
                    for i in range(self.data):
                        total ^= self._isal.gf_mul(int(self._matrix[fragment, i]), int(inverse[i, column]))
                    coefficients[row, column] = total
            found = self._make_tables(coefficients)
            with self._lock:
                self._decode_tables_cache[have, missing] = found
        return found

    def _make_tables(self, matrix: ByteArray) -> ByteArray:
        matrix = np.ascontiguousarray(matrix)
        tables = np.zeros(32 * max(1, matrix.size), np.uint8)
        if len(matrix):
            self._isal.ec_init_tables(self.data, len(matrix), _address(matrix), _address(tables))
        return tables

    def _multiply(self, tables: ByteArray, sources: Sequence[ByteArray], targets: Sequence[ByteArray]) -> None:
        if not targets:
            return
        length = len(sources[0])
        if any(len(s) != length for s in (*sources, *targets)):
            raise ValueError("fragments of different lengths")
        self._isal.ec_encode_data(length, self.data, len(targets), _address(tables), _pointers(sources), _pointers(targets))


@functools.cache
def erasure_code(data: int, parity: int) -> ErasureCode:
    """Return the code for `data` + `parity` fragments. Each code is made once per process."""
    return ErasureCode(data, parity)


def _address(array: ByteArray) -> ctypes.c_void_p:
    return array.ctypes.data_as(ctypes.c_void_p)


def _pointers(arrays: Sequence[ByteArray]) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * len(arrays))(*(a.ctypes.data for a in arrays))


@functools.cache
def _load_isal() -> ctypes.CDLL:
    """Return the ISA-L library. ctypes releases the GIL during its calls."""
    failures = []
    for path in _library_paths():
        try:
            library = ctypes.CDLL(path)
            library.ec_encode_data.restype = None
            library.ec_init_tables.restype = None
            library.gf_gen_cauchy1_matrix.restype = None
            library.gf_mul.argtypes = [ctypes.c_ubyte, ctypes.c_ubyte]
            library.gf_mul.restype = ctypes.c_ubyte
            return library
        except (OSError, AttributeError) as error:
            failures.append(f"{path}: {error}")
    raise StoreError(
        'an erasure code needs ISA-L: pip install "ckpt-store[erasure]", or install the package libisal2 of the system'
        + (f" (tried {'; '.join(failures)})" if failures else "")
    )


def _library_paths() -> list[str]:
    found = []
    spec = importlib.util.find_spec("pyeclib")
    if spec is not None and spec.origin is not None:
        site = Path(spec.origin).parent.parent
        found += [str(p) for folder in ("pyeclib.libs", "pyeclib/.dylibs") for p in sorted((site / folder).glob("libisal*"))]
    system = ctypes.util.find_library("isal")
    return found + ([system] if system else [])

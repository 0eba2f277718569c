"""The public module `ckpt.dtypes`: names of element types. The code is in `ckpt.state.dtype_names`."""

from ckpt.state.dtype_names import dtype_name as dtype_name
from ckpt.state.dtype_names import numpy_dtype as numpy_dtype

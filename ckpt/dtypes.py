"""The public module `ckpt.dtypes`: names of element types. The code is in `ckpt.state.dtypes`."""

from ckpt.state.dtypes import dtype_name as dtype_name
from ckpt.state.dtypes import numpy_dtype as numpy_dtype

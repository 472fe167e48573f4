"""Makes Triton's interpreter do the same in half the time, and without warnings.

Before each launch, Triton replaces the functions of `triton.language` with interpreted
ones. It does so again in every call of another `@triton.jit` function, and `tl.sum` and
`tl.max` are such functions. There is nothing left to replace then, but to find that out
takes about 1 ms a call: more than the rest of a short kernel. So that is skipped.

`kernels.lab.backend` imports this where kernels are interpreted. Weighed: to wait
for a release of Triton. 3.6 to 3.9 all replace anew.
"""

import functools
import warnings
from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import Any

import triton.language as tl
from triton.runtime import interpreter

# NumPy warns of inf - inf; a GPU makes its NaN in silence.
warnings.filterwarnings(
    "ignore", category=RuntimeWarning, module=r"triton\.runtime\.interpreter"
)


def is_replaced(language: ModuleType) -> bool:
    """Whether a module's functions, and a tensor's methods, are interpreted ones."""
    some = language.load, language.reduce, language.tensor.__add__
    return not any(map(tl.core.is_builtin, some))


def only_where_needed(replace: Callable[[FunctionType], Any]) -> Callable:
    """Returns Triton's `_patch_lang`, or skips it where it would change nothing.

    Args:
        replace: takes a kernel's function, replaces what the function sees of
            `triton.language`, and returns what was replaced.
    """

    @functools.wraps(replace)
    def patch_lang(function: FunctionType) -> Any:
        seen = function.__globals__.values()
        languages = [value for value in seen if value is tl or value is tl.core]
        if languages and all(map(is_replaced, languages)):
            return interpreter._LangPatchScope()  # nothing to be restored
        return replace(function)

    return patch_lang


# A Triton that has not both of these replaces in another way, and is left alone.
if hasattr(interpreter, "_patch_lang") and hasattr(interpreter, "_LangPatchScope"):
    interpreter._patch_lang = only_where_needed(interpreter._patch_lang)

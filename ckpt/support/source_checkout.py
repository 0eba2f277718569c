"""Recognises that Python imports `ckpt` from a source checkout, whose folder `ckpt` lacks the other parts of the package."""

from __future__ import annotations

from pathlib import Path


def require_all_parts() -> None:
    """Raise ImportError if the other parts of the package, such as `ckpt.storage`, are missing.

    Python takes the folder `ckpt` of a checkout in place of the installed package if the current folder, or the folder of the
    script, is the checkout. An editable install finds the other parts there.
    """
    try:
        import ckpt.storage  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name != "ckpt.storage":
            raise
        checkout = Path(__file__).parents[2]
        raise ImportError(
            f"Python imports ckpt from the source files in {checkout}, which are not a whole package: "
            "run Python in another folder, or install ckpt there with pip install -e ."
        ) from None

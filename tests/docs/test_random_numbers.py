"""No module of the product draws from the random generators of the user's program.

Otherwise a retry would change the training, and ranks that have the same seed would all pause for the same time.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from helpers.folders import REPOSITORY

FILES = [path for part in ("ckpt", "storage", "aggregator", "recovery", "tools") for path in (REPOSITORY / part).rglob("*.py")]
GLOBAL_GENERATORS = ("random", "np.random", "numpy.random")
ALLOWED = {"Random", "SystemRandom", "RandomState", "MT19937", "SeedSequence", "default_rng", "seed"}
ALLOWED |= {"getstate", "setstate", "get_state", "set_state"}
"""These make a generator, or save, restore and seed those of the user, as the data loader does for each sample."""


def draws(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of each call that draws a number from a global generator."""
    for call in ast.walk(tree):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute):
            generator = ast.unparse(call.func.value)
            if generator in GLOBAL_GENERATORS and call.func.attr not in ALLOWED:
                yield call.lineno, ast.unparse(call.func)


def test_a_draw_is_found() -> None:
    tree = ast.parse("random.uniform(0, 1)\nrandom.SystemRandom().uniform(0, 1)\nnp.random.rand(3)\nrandom.Random(7).random()")
    assert list(draws(tree)) == [(1, "random.uniform"), (3, "np.random.rand")]


def test_no_module_draws_from_a_global_generator() -> None:
    found = [(path.name, *draw) for path in FILES for draw in draws(ast.parse(path.read_text()))]
    assert len(FILES) > 300
    assert found == []

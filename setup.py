"""The packages, found by folder. All else is in pyproject.toml.

The folders stand at the top of the repository. Installed, they are one package, so that a training repository's own `tools/` or
`storage/` can never shadow ours.
"""

import shutil

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

FOLDERS = {
    "ckpt": "ckpt",
    "ckpt.storage": "storage",
    "ckpt.aggregator": "aggregator",
    "ckpt.recovery": "recovery",
    "ckpt.tools": "tools",
}


class FreshBuild(build_py):
    """Builds into an empty folder. setuptools would also pack what an earlier build left there and the sources have no more."""

    def run(self) -> None:
        if not self.editable_mode:
            shutil.rmtree(self.build_lib, ignore_errors=True)
        super().run()


setup(
    cmdclass={"build_py": FreshBuild},
    packages=[
        name
        for package, folder in FOLDERS.items()
        for name in (package, *(f"{package}.{below}" for below in find_packages(folder)))
    ],
    package_dir=FOLDERS,
)

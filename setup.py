"""The packages, found by folder. All else is in pyproject.toml.

The folders stand at the top of the repository. Installed, they are one package, so that a training repository's own `tools/` or
`storage/` can never shadow ours.
"""

from setuptools import find_packages, setup

FOLDERS = {
    "ckpt": "ckpt",
    "ckpt.storage": "storage",
    "ckpt.aggregator": "aggregator",
    "ckpt.recovery": "recovery",
    "ckpt.tools": "tools",
}

setup(
    packages=[
        name
        for package, folder in FOLDERS.items()
        for name in (package, *(f"{package}.{below}" for below in find_packages(folder)))
    ],
    package_dir=FOLDERS,
)

"""A training run with MindSpore that is killed and restored has the losses of an undisturbed one, in each mode of execution."""

from __future__ import annotations

from helpers.folders import PROGRAMS

from ckpt.adapters.testing import ResumeContract


class _Training(ResumeContract):
    program = PROGRAMS / "mindspore_training.py"


class TestPyNative(_Training):
    arguments = ("pynative", "adam")


class TestGraph(_Training):
    arguments = ("graph", "momentum")


class TestCompiledStepInPyNative(_Training):
    arguments = ("jit", "adam")


class TestExperimentalOptimizerAndSchedule(_Training):
    arguments = ("pynative", "adamw")

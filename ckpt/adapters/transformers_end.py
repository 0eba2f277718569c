"""Whether the training of a Trainer has ended in the step from which it resumes."""

from __future__ import annotations

import json
from typing import Any

from transformers import EarlyStoppingCallback


def reason_of_end(trainer: Any, state_json: str, max_steps: int) -> str | None:
    """Return in words why a Trainer that resumes has nothing to train, or None if it has.

    A callback of the script that stops the training for another reason, such as a limit of time, is not such a reason.

    state_json: the saved state of the Trainer.
    max_steps: how many updates the training has by the arguments of the script.
    """
    state = json.loads(state_json)
    if state["global_step"] >= max_steps:
        return f"all of its {max_steps} updates are done"
    for name, saved in _early_stops(trainer, state):
        if saved["attributes"]["early_stopping_patience_counter"] >= saved["args"]["early_stopping_patience"]:
            return f"the patience of {name} is used up: to continue, raise early_stopping_patience"
    return None


def _early_stops(trainer: Any, state: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Return the early stops of the script, with the counters that `TrainerRun.restore_callbacks` will set."""
    found: list[tuple[str, dict[str, Any]]] = []
    numbers: dict[str, int] = {}
    for callback in trainer.callback_handler.callbacks:
        name = type(callback).__name__
        saved = state.get("stateful_callbacks", {}).get(name)
        if not isinstance(callback, EarlyStoppingCallback) or saved is None:
            continue
        number = numbers[name] = numbers.get(name, -1) + 1
        states = saved if isinstance(saved, list) else [saved]
        if number < len(states):
            stored = states[number]
            uses_saved_arguments = trainer.args.restore_callback_states_from_checkpoint
            arguments = stored["args"] if uses_saved_arguments else callback.state()["args"]
            found.append((name, {"args": arguments, "attributes": callback.state()["attributes"] | stored["attributes"]}))
    return found

"""The coordinator that brings a training job back: detect, decide, restart. Empty until tiers exist."""

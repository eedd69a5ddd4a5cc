"""Optimizers over flat buffers: their options, parameter groups, schedules, clipping. Knows Arrays, never a model."""

"""Data parallelism on flat buffers: who reduces which gradients when. Knows only Arrays and groups, never a model."""

"""Tasks: what a network learns. `Task` is a network with its loss and metrics; `kinds` lists what `--task` names."""

from kilter.tasks.task import EVAL_BATCH, Task

__all__ = ["EVAL_BATCH", "Task"]

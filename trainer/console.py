"""What a training run shows in the console: one short line per log, above transformers' progress bar."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers import TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ProgressCallback

from .data.wording import counted
from .evaluation.formatting import significant
from .evaluation.head_metrics import by_depth

LABELS = {"loss": "loss", "eval_loss": "held-out loss", "learning_rate": "lr", "grad_norm": "grad"}


@contextmanager
def without_invitation() -> Iterator[None]:
    """Drop transformers' log line that invites to share the model, which it writes even if nothing was trained."""
    source = logging.getLogger("transformers.trainer")

    def keep(record: logging.LogRecord) -> bool:
        return "share your model" not in record.getMessage()

    source.addFilter(keep)
    try:
        yield
    finally:
        source.removeFilter(keep)


class HeadProgress(ProgressCallback):
    """transformers' progress bar with its estimate of the time left; log lines say what the head improves."""

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        """Write the logs as one line above the progress bar, in the main process only."""
        if state.is_world_process_zero and self.training_bar is not None:
            self.training_bar.write(f"step {state.global_step}  {log_line(logs)}")


def log_line(logs: dict[str, float]) -> str:
    """Summarise a log: loss, KL before and after per depth, share removed, agreement, tokens per forward.

    Args:
        logs: entries passed to `Trainer.log`, of training or of an evaluation. Logs with none of the entries above
            are listed as they are.

    Returns:
        One line of text.
    """
    prefix = "eval_" if "eval_loss" in logs else ""
    parts = [f"{label} {logs[name]:.4g}" for name, label in LABELS.items() if name in logs]
    if "skipped_steps" in logs:
        skipped = counted(logs["skipped_steps"], "step that was", "steps that were")
        parts.append(f"skipped {skipped} not finite")
    before, after = by_depth(logs, f"{prefix}kl_before"), by_depth(logs, f"{prefix}kl_after")
    if before:
        kl = " ".join(f"{significant(b)}>{significant(a)}" for b, a in zip(before, after, strict=True))
        parts.append(f"KL {kl} (removed {_percent(by_depth(logs, f'{prefix}kl_removed'))})")
        parts.append(f"same pick {_percent(by_depth(logs, f'{prefix}same_pick'))}")
        parts.append(f"expect {logs[f'{prefix}expected_tokens_per_forward']:.2f} tokens/forward")
    if f"{prefix}tokens_per_forward" in logs:
        accepted = _percent(by_depth(logs, f"{prefix}accepted"))
        parts.append(f"decoded {logs[f'{prefix}tokens_per_forward']:.2f} tokens/forward (accepted {accepted})")
    if not parts:
        parts = [f"{name} {value:.4g}" for name, value in logs.items() if isinstance(value, float)]
    return "  ".join(parts)


def _percent(shares: list[float]) -> str:
    return "/".join(f"{100 * share:.0f}" for share in shares) + " %"

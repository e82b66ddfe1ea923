"""What a training run shows in the console: one short line per log, under transformers' progress bar."""

from transformers.trainer_callback import ProgressCallback

PLAIN = {"loss": "loss", "eval_loss": "held-out loss", "learning_rate": "lr", "grad_norm": "grad"}


class HeadProgress(ProgressCallback):
    """transformers' progress bar (with ETA); log lines say in words what the head gains."""

    def on_log(self, args, state, control, logs=None, **kwargs):
        if state.is_world_process_zero and self.training_bar is not None:
            self.training_bar.write(f"step {state.global_step}  {describe(logs)}")


def describe(logs: dict[str, float]) -> str:
    """One line: loss, KL before and after per depth, share removed, agreement per depth, tokens per forward.

    Args:
        logs: as given to `Trainer.log`, of training or of an evaluation; other figures are shown as they are.
    """
    prefix = "eval_" if "eval_loss" in logs else ""
    depths = range(1, 1 + sum(name.startswith(f"{prefix}kl_before_") for name in logs))
    parts = [f"{label} {logs[name]:.4g}" for name, label in PLAIN.items() if name in logs]
    if depths:
        kl = (f"{logs[f'{prefix}kl_before_{k}']:.3f}>{logs[f'{prefix}kl_after_{k}']:.3f}" for k in depths)
        removed = (f"{100 * logs[f'{prefix}kl_removed_{k}']:.0f}" for k in depths)
        picks = (f"{100 * logs[f'{prefix}same_pick_{k}']:.0f}" for k in depths)
        parts += [f"KL {' '.join(kl)} (removed {'/'.join(removed)} %)", f"same pick {'/'.join(picks)} %"]
        parts.append(f"expect {logs[f'{prefix}expected_tokens_per_forward']:.2f} tokens/forward")
    if f"{prefix}tokens_per_forward" in logs:
        accepted = [100 * value for name, value in logs.items() if name.startswith(f"{prefix}accepted_")]
        rates = "/".join(f"{rate:.0f}" for rate in accepted)
        parts.append(f"decoded {logs[f'{prefix}tokens_per_forward']:.2f} tokens/forward (accepted {rates} %)")
    if len(parts) == 0:
        parts = [f"{name} {value:.4g}" for name, value in logs.items() if isinstance(value, float)]
    return "  ".join(parts)

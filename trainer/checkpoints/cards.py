"""Model cards, written from `hub_cards/card_template.md`."""

import re
from importlib import resources
from pathlib import Path
from string import Template

from transformers import PretrainedConfig

from modeling_mrp import MRPForDiffusionLM

from ..data.wording import counted
from .weight_files import base_of

MODES_WITH_HEAD = """\
`mrp_mode` is None (the backbone alone), "spec" (the head drafts and the backbone verifies: the same tokens in fewer
forwards), "direct" (the head's tokens are kept without verification) or "remask" (many tokens are revealed at once,
and the head masks doubtful ones again)."""
MODES_WITHOUT_HEAD = """\
`mrp_mode` is None (one backbone forward a step) or "spec" (the backbone drafts from its last logits and verifies: the
same tokens in fewer forwards)."""


def render_card(
    model: MRPForDiffusionLM,
    *,
    name: str,
    repository: str | None = None,
    license: str | None = None,
    figures: str = "",
) -> str:
    """Return the text of a model card.

    Args:
        model: the model to describe.
        name: title of the card.
        repository: repository that the card's example loads; None means `name`.
        license: identifier of the license for the front matter; None leaves the line out.
        figures: measured results, as Markdown.
    """
    config = model.config
    base_model, base_revision = base_of(model)
    layers = config.num_mrp_layers
    on_hub = "/" in base_model
    front_matter = [f"base_model: {base_model}"] if on_hub else []
    front_matter += [f"license: {license}"] if license else []
    template = Template((resources.files("hub_cards") / "card_template.md").read_text(encoding="utf-8"))
    text = template.substitute(
        name=name,
        repository=repository or name,
        front_matter="\n".join(front_matter),
        summary="A block diffusion language model"
        + (f" with a {_kind_of_head(config)} as tokens are revealed." if layers else "."),
        backbone=base_model + (f", revision {base_revision}" if base_revision else ""),
        layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        block_size=config.block_size,
        head=counted(layers, "layer") if layers else "none",
        dtype=str(model.dtype).removeprefix("torch."),
        mode='"spec"' if layers else "None",
        modes=MODES_WITH_HEAD if layers else MODES_WITHOUT_HEAD,
        figures=f"\n{figures.strip()}\n" if figures.strip() else "",
    )
    return re.sub(r"\n{3,}", "\n\n", text.replace("text-generation\n\ntags", "text-generation\ntags")).rstrip() + "\n"


def _kind_of_head(config: PretrainedConfig) -> str:
    if config.mrp_residual:
        return "residual head that predicts how its logits change"
    return "head that predicts its next logits in full (an ablation of the residual head)"


def card_license(folder: str | Path) -> str | None:
    """Return the license in the front matter of a checkpoint's README.md, or None if there is none."""
    path = Path(folder) / "README.md"
    if not path.exists():
        return None
    front = re.match(r"---\n(.*?)\n---", path.read_text(encoding="utf-8"), re.DOTALL)
    stated = re.search(r"^license: *(\S+) *$", front.group(1), re.MULTILINE) if front else None
    return stated.group(1) if stated else None

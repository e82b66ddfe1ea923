"""Draw hub_cards/round.svg, the README's picture of one round of speculative decoding.

python -m hub_cards.build.figure
"""

from collections.abc import Sequence
from html import escape
from pathlib import Path

FIGURE = Path(__file__).parents[1] / "round.svg"
WIDTH, HEIGHT = 1040, 412
CELL_WIDTH, CELL_HEIGHT, GAP = 42, 32, 4
FONT = "-apple-system, 'Segoe UI', Helvetica, Arial, sans-serif"

MASKED = ""
START = ["23", "+", MASKED, MASKED, MASKED, MASKED]
# What each draft reveals: position in the block, token, and the logits that it is read from.
DRAFTS = [(2, "14", "A"), (3, "=", "A + C"), (5, ".", "A + C"), (4, "27", "A + C")]
VERDICTS = ["its own choice", "chooses the same", "chooses the same", "chooses 37 instead"]
ACCEPTED = 3
FIRST_ROW, ROW_HEIGHT = 106, 56

# Colours for light and for dark pages. The figure has a background of its own, so that it can be read on either.
COLOURS = {
    "card": ("fill", "#ffffff", "#0d1117"),
    "edge": ("stroke", "#d1d9e0", "#3d444d"),
    "text": ("fill", "#1f2328", "#f0f6fc"),
    "quiet": ("fill", "#59636e", "#9198a1"),
    "line": ("stroke", "#818b98", "#656c76"),
    "head": ("fill", "#818b98", "#656c76"),
    "panel": ("fill", "#f6f8fa", "#151b23"),
    "masked": ("fill", "#ffffff", "#0d1117"),
    "masked-edge": ("stroke", "#afb8c1", "#4a525c"),
    "known": ("fill", "#ddf4ff", "#12304f"),
    "known-edge": ("stroke", "#54aeff", "#388bfd"),
    "new": ("fill", "#fff1b8", "#4b3a0a"),
    "new-edge": ("stroke", "#d4a72c", "#bb8009"),
    "yes": ("fill", "#1a7f37", "#3fb950"),
    "no": ("fill", "#cf222e", "#f85149"),
}


def style() -> str:
    """The style sheet: light colours, and dark ones for readers whose system asks for them."""
    light = "".join(f".{name}{{{kind}:{colour}}}" for name, (kind, colour, _) in COLOURS.items())
    dark = "".join(f".{name}{{{kind}:{colour}}}" for name, (kind, _, colour) in COLOURS.items())
    return f"<style>text{{font-family:{FONT}}}{light}@media (prefers-color-scheme:dark){{{dark}}}</style>"


def text(
    x: float, y: float, words: str, *, size: int = 14, kind: str = "text", anchor: str = "start", bold: bool = False
) -> str:
    """One line of text; `y` is its base line."""
    weight = ' font-weight="600"' if bold else ""
    place = f'x="{x}" y="{y}" font-size="{size}" text-anchor="{anchor}"{weight}'
    return f'<text {place} class="{kind}">{escape(words)}</text>'


def block(x: float, y: float, tokens: Sequence[str], new: int | None = None) -> str:
    """A state of the block, one cell for each position.

    Args:
        x: left edge.
        y: top edge.
        tokens: the tokens, `MASKED` where none is revealed.
        new: the position that has just been revealed.
    """
    parts = []
    for position, token in enumerate(tokens):
        kind = "masked" if token == MASKED else "new" if position == new else "known"
        left = x + position * (CELL_WIDTH + GAP)
        dashes = ' stroke-dasharray="4 3"' if kind == "masked" else ""
        parts.append(
            f'<rect x="{left}" y="{y}" width="{CELL_WIDTH}" height="{CELL_HEIGHT}" rx="5" stroke-width="1.4"{dashes} '
            f'class="{kind} {kind}-edge"/>'
        )
        if token != MASKED:
            parts.append(text(left + CELL_WIDTH / 2, y + 21, token, anchor="middle", bold=position == new))
    return "".join(parts)


def arrow(points: Sequence[tuple[float, float]]) -> str:
    """A line through the points with a head at the last one."""
    path = " ".join(f"{x},{y}" for x, y in points)
    return f'<polyline points="{path}" fill="none" stroke-width="1.6" class="line" marker-end="url(#tip)"/>'


def panel(x: float, width: float, number: int, title: str, subtitle: str) -> str:
    """The background of a stage, with its heading."""
    return (
        f'<rect x="{x}" y="24" width="{width}" height="306" rx="10" class="panel"/>'
        + text(x + 18, 54, f"{number}  {title}", size=17, bold=True)
        + text(x + 18, 77, subtitle, size=13, kind="quiet")
    )


def backbone_stage(x: float) -> str:
    """The state that the round starts from."""
    return (
        panel(x, 318, 1, "Backbone", "its logits A are known from the last round")
        + block(x + 22, FIRST_ROW, START)
        + text(x + 22, FIRST_ROW + 58, "a block of six positions, two are revealed", size=13, kind="quiet")
        + text(x + 22, FIRST_ROW + 116, "A", bold=True)
        + text(x + 76, FIRST_ROW + 116, "backbone's logits on this state", size=13, kind="quiet")
        + text(x + 22, FIRST_ROW + 142, "C", bold=True)
        + text(x + 76, FIRST_ROW + 142, "change predicted by the head", size=13, kind="quiet")
        + text(x + 22, FIRST_ROW + 168, "A + C", bold=True)
        + text(x + 76, FIRST_ROW + 168, "≈ the backbone's next logits", size=13, kind="quiet")
    )


def head_stage(x: float) -> str:
    """The chain of drafts, each a cheap head step on the one before it."""
    parts = [panel(x, 364, 2, "Head drafts", "one small step for each draft after the first")]
    state = START
    for row, (position, token, source) in enumerate(DRAFTS):
        y = FIRST_ROW + row * ROW_HEIGHT
        state = [*state[:position], token, *state[position + 1 :]]
        parts.append(text(x + 18, y + 21, source, bold=True))
        parts.append(block(x + 76, y, state, new=position))
        if row:
            middle = x + 76 + position * (CELL_WIDTH + GAP) + CELL_WIDTH / 2
            parts.append(arrow([(middle, y - ROW_HEIGHT + CELL_HEIGHT + 3), (middle, y - 4)]))
    return "".join(parts)


def verification_stage(x: float) -> str:
    """The backbone's verdict on every draft, from one forward over all states."""
    parts = [panel(x, 228, 3, "Backbone verifies", "all four states in one forward")]
    for row, verdict in enumerate(VERDICTS):
        y, accepted = FIRST_ROW + row * ROW_HEIGHT + 21, row < ACCEPTED
        parts.append(text(x + 24, y, "✓" if accepted else "✗", size=18, kind="yes" if accepted else "no", bold=True))
        parts.append(text(x + 52, y, verdict))
    return "".join(parts)


def figure() -> str:
    """The whole picture as SVG."""
    marker = (
        '<marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0,0.5 L8,4 L0,7.5 z" class="head"/></marker>'
    )
    first, last = FIRST_ROW, FIRST_ROW + (len(DRAFTS) - 1) * ROW_HEIGHT + CELL_HEIGHT
    bracket = f'<path d="M748,{first} h8 V{last} h-8" fill="none" stroke-width="1.6" class="line"/>'
    outcome = "Three tokens for one backbone forward. The next round starts with the backbone's own 37,"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-labelledby="title">',
        '<title id="title">One round of speculative decoding: backbone logits, head drafts, verification</title>',
        style(),
        f"<defs>{marker}</defs>",
        f'<rect x="1" y="1" width="{WIDTH - 2}" height="{HEIGHT - 2}" rx="14" class="card edge"/>',
        backbone_stage(24),
        head_stage(374),
        verification_stage(788),
        arrow([(324, first + CELL_HEIGHT / 2), (384, first + CELL_HEIGHT / 2)]),
        bracket,
        arrow([(756, (first + last) / 2), (800, (first + last) / 2)]),
        text(WIDTH / 2, 362, outcome, size=15, anchor="middle"),
        text(WIDTH / 2, 387, "so the text is exactly what the backbone would write alone.", size=15, anchor="middle"),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def main() -> None:
    """Write the figure."""
    FIGURE.write_text(figure(), encoding="utf-8")
    print(f"wrote {FIGURE.name}")


if __name__ == "__main__":
    main()

"""Draws architecture.svg: `python docs/explanation/draw_architecture.py`. A test compares the two."""

from __future__ import annotations

__all__ = ("picture",)

from pathlib import Path

INK, LINE, NEW, QUIET = "#1c2733", "#5b6b7b", "#c2410c", "#475569"
SAVE = "flatten prioritise device_to_host limit_bytes write commit finalize"
SAVE_MESSAGES = "Leaf Leaf Staged Staged Written Committed"
RESTORE = "locate plan prioritise limit_bytes read host_to_device assemble"
RESTORE_MESSAGES = "Located ReadLeaf ReadLeaf Read Host Restored"
FACE = ("Checkpointer", "steps", "sync, blocking", "orbax, orbax.v1", "tools, cli", "testing")
HANDLERS = (
    ("leaves/", "a handler for each kind:", "arrays, numbers, strings", "2  a new leaf type"),
    ("formats/", "Orbax, safetensors:", "chunks, codecs, documents", "3  a new codec"),
    ("layouts/", "what is at a path,", "and several items as one", ""),
    ("ocdbt/", "the database that holds", "the chunks of a checkpoint", ""),
    ("stores/", "files, by capability:", "local disks and buckets", "4  a new store"),
    ("coordinators/", "how the processes", "of a job agree", ""),
)
KERNEL = (
    ("messages/", "what travels"),
    ("protocols/", "who asks what"),
    ("pipeline/", "runs the stages"),
    ("memory/", "the byte budget"),
    ("concurrency/", "threads"),
)


def text(x: float, y: float, words: str, size: float = 13, **also: str) -> str:
    """One line of text; `also` has attributes of SVG, with `_` for `-`."""
    given = {"fill": INK, "font_family": "sans-serif"} | also
    attributes = "".join(f' {name.replace("_", "-")}="{value}"' for name, value in given.items())
    return f'<text x="{x:g}" y="{y:g}" font-size="{size:g}"{attributes}>{words}</text>'


def box(x: float, y: float, width: float, height: float, fill: str = "#ffffff") -> str:
    """A box with round corners."""
    size = f'width="{width:g}" height="{height:g}"'
    return f'<rect x="{x:g}" y="{y:g}" {size} rx="8" fill="{fill}" stroke="{LINE}" stroke-width="1.2"/>'


def new(x: float, y: float, width: float, words: str) -> list[str]:
    """A place where something new goes."""
    size = f'width="{width:g}" height="28" rx="6" fill="#fff7ed"'
    frame = f'<rect x="{x:g}" y="{y:g}" {size} stroke="{NEW}" stroke-width="1.6" stroke-dasharray="4 3"/>'
    return [frame, text(x + width / 2, y + 19, words, fill=NEW, font_weight="bold", text_anchor="middle")]


def arrow(points: str, colour: str = LINE, also: str = "") -> str:
    """A line through `points` with a head at its end."""
    head = "n" if colour == NEW else "a"
    look = f'fill="none" stroke="{colour}" stroke-width="1.6"{also} marker-end="url(#{head})"'
    return f'<path d="{points}" {look}/>'


def part(y: float, height: float, fill: str, name: str, what: str) -> list[str]:
    """One of the four parts, from edge to edge."""
    title = text(36, y + 24, f"{name}/", 15, font_family="monospace", font_weight="bold")
    return [box(20, y, 1160, height, fill), title, text(52 + 9.2 * len(name) + 12, y + 24, what)]


def flow(y: float, name: str, stages: str, messages: str, ends: tuple[str, str]) -> list[str]:
    """The stages of a save or of a restore, with what travels between them."""
    lines = [text(36, y - 12, name, 14, font_weight="bold"), text(36, y + 24, ends[0], font_style="italic")]
    lines += [arrow(f"M67 {y + 20:g}H83"), text(36, y + 58, "messages", 11, fill=QUIET)]
    for at, stage in enumerate(stages.split()):
        x = 84 + 142 * at
        lines += [box(x, y, 116, 40), arrow(f"M{x + 117} {y + 20:g}H{x + 141}")]
        lines.append(text(x + 58, y + 24, stage, 12, font_family="monospace", text_anchor="middle"))

    for at, message in enumerate(messages.split()):
        lines.append(text(213 + 142 * at, y + 58, message, 11, fill=QUIET, text_anchor="middle"))

    return [*lines, text(1084, y + 24, ends[1], font_style="italic")]


def picture() -> str:
    """The whole picture, as SVG."""
    lines = part(
        16, 76, "#eef2ff", "src/penstock", "what users import; it alone puts the parts below together"
    )
    for at, name in enumerate(FACE):
        lines.append(box(36 + 190 * at, 52, 178, 30))
        lines.append(text(125 + 190 * at, 72, name, text_anchor="middle"))

    lines += part(128, 272, "#ecfdf5", "stages", "one actor per file; a pipeline is an ordered list of them")
    lines += flow(206, "save", SAVE, SAVE_MESSAGES, ("tree", "checkpoint"))
    lines += [*new(418, 164, 156, "1  a new stage"), arrow("M496 193V220", NEW)]
    lines += flow(326, "restore", RESTORE, RESTORE_MESSAGES, ("path", "tree"))
    lines += [*new(276, 284, 156, "1  its inverse"), arrow("M354 313V340", NEW)]
    lines += part(436, 172, "#fefce8", "handlers", "what knows types, formats and stores")
    for at, (name, first, second, mark) in enumerate(HANDLERS):
        x = 36 + 190 * at
        lines += [
            box(x, 470, 178, 126),
            text(x + 12, 492, name, 14, font_family="monospace", font_weight="bold"),
        ]
        lines += [text(x + 12, 513, first, 12), text(x + 12, 532, second, 12)]
        lines += new(x + 12, 556, 154, mark) if mark else []

    lines += part(
        644, 104, "#f1f5f9", "kernel", "mechanism only: what travels, who may ask what, who runs and counts"
    )
    step = 1138.5 / len(KERNEL)
    for at, (name, what) in enumerate(KERNEL):
        x, middle = 33 + step * at, 33 + step * (at + 0.5) - 2.25
        lines += [box(x, 680, step - 4.5, 58), text(middle, 723, what, 11.5, text_anchor="middle")]
        lines.append(
            text(middle, 702, name, 11.5, font_family="monospace", font_weight="bold", text_anchor="middle")
        )

    dashed = ' stroke-dasharray="5 4"'
    lines += [arrow("M600 92V126"), arrow("M1180 54H1192V522H1182"), arrow("M600 608V642")]
    lines.append(arrow("M20 264H8V696H18"))
    lines.append(arrow("M330 400V434", also=dashed))
    lines.append(
        text(342, 422, "calls, through protocols of the kernel; imports nothing of it", 12, fill=QUIET)
    )
    lines.append(text(612, 630, "an unbroken arrow: imports", 12, fill=QUIET))
    frame = 'xmlns="http://www.w3.org/2000/svg" viewBox="0 0 1200 764" width="1200" height="764" role="img"'
    heads = "".join(
        f'<marker id="{name}" viewBox="0 0 10 10" refX="9" refY="5" orient="auto" markerWidth="7"'
        ' markerHeight="7">'
        f'<path d="M0 0 10 5 0 10z" fill="{colour}"/></marker>'
        for name, colour in (("a", LINE), ("n", NEW))
    )
    label = 'aria-label="The parts of penstock, and where new ones go"'
    head = [
        f"<svg {frame} {label}>",
        f"<defs>{heads}</defs>",
        '<rect width="1200" height="764" fill="#ffffff"/>',
    ]
    return "\n".join([*head, *lines, "</svg>", ""])


if __name__ == "__main__":
    Path(__file__).with_name("architecture.svg").write_text(picture())

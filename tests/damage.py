"""The ways in which a file can be damaged, and the contents of a folder to compare."""

DAMAGE = {
    "removed": lambda content: None,
    "emptied": lambda content: b"",
    "cut in half": lambda content: content[: len(content) // 2],
    "cut by a byte": lambda content: content[:-1],
    "first half zeroed": lambda content: bytes(len(content) // 2) + content[len(content) // 2 :],
    "second half zeroed": lambda content: content[: len(content) // 2] + bytes(len(content) - len(content) // 2),
    "one bit flipped": lambda content: content[:9] + bytes([content[9] ^ 1]) + content[10:],
    "one byte added": lambda content: content + b"\0",
}


def damage(path, kind):
    content = DAMAGE[kind](path.read_bytes())
    if content is None:
        path.unlink()
    else:
        path.write_bytes(content)


def snapshot(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}

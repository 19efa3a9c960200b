"""The blocks of a lesson, with the directives in comments above them; changes to its text."""
import dataclasses
import re

DIRECTIVE = re.compile(r"^\s*<!-- (cut|template|quotes|prints|prints times|prints slow|ask): (.*)$")
FENCE = re.compile(r"^\s*(```+|~~~+)(\w*)\s*$")


@dataclasses.dataclass
class Block:
    """A fence, an indented block of code, or a paragraph of text."""
    kind: str
    line: int  # of its first line of content, from 1
    lines: list
    language: str = ""
    directives: list = dataclasses.field(default_factory=list)  # [(name, text, line)]


def parse(text):
    """The blocks of a Markdown file, in order."""
    lines, blocks, directives, i = text.split("\n"), [], [], 0

    def take(kind, begin, end, language=""):
        blocks.append(Block(kind, begin + 1, lines[begin:end], language, list(directives)))
        directives.clear()

    while i < len(lines):
        directive, fence = DIRECTIVE.match(lines[i]), FENCE.match(lines[i])
        if directive:  # to the line that ends with -->
            end = next((k for k in range(i, len(lines)) if lines[k].rstrip().endswith("-->")), len(lines) - 1)
            text = "\n".join([directive[2], *lines[i + 1:end + 1]]).rstrip().removesuffix("-->").rstrip()
            directives.append((directive[1], text, i + 1))
            i = end + 1
        elif fence:
            end = next((k for k in range(i + 1, len(lines)) if lines[k].strip() == fence[1]), len(lines))
            take("fence", i + 1, end, fence[2])
            i = end + 1
        elif not lines[i].strip():
            i += 1
        elif lines[i].startswith("    "):
            end = i
            while end < len(lines) and (lines[end].startswith("    ") or not lines[end].strip()):
                end += 1
            while not lines[end - 1].strip():
                end -= 1
            take("indented", i, end)
            i = end
        else:
            end = i + 1
            while end < len(lines) and lines[end].strip() and not lines[i].startswith("#") and \
                    not FENCE.match(lines[end]) and not DIRECTIVE.match(lines[end]):
                end += 1
            take("text", i, end)
            i = end
    if directives:
        blocks.append(Block("text", len(lines), [], "", directives))
    return blocks


def reading_minutes(text):
    """Without what is folded away: 180 words of text a minute, 15 seconds for a row of a table and a line of code."""
    words = rows = 0
    for block in parse(re.sub(r"<details>.*?</details>", "", text, flags=re.S)):
        for line in block.lines:
            if block.kind != "text" or line.startswith("|"):
                rows += bool(line.strip())
            else:
                words += len(line.split())
    return words / 180 + rows / 4


@dataclasses.dataclass
class Change:
    """What --write does to a page: other lines of a fence or table."""
    line: int
    old: list
    new: list


def rewrite(path, changes):
    """Changes the page; what was written."""
    lines, written = path.read_text("utf-8").split("\n"), []
    for each in sorted(changes, key=lambda change: change.line, reverse=True):
        lines[each.line - 1:each.line - 1 + len(each.old)] = each.new
        written.append(f"{path}:{each.line}")
    if changes:
        path.write_text("\n".join(lines), "utf-8")
    return written

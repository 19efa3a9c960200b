"""Command lines for restart.py: their flags, and the layout that fits fewer slots."""
import re

LAUNCHER_COUNT = ("-np", "--np", "-n", "-c")
LAUNCHER_HOSTS = ("--hostfile", "-hostfile", "--machinefile", "-machinefile", "--default-hostfile")
def whole(text):
    return int(text) if text and re.fullmatch("[0-9]{1,9}", text) else None


class Command:
    """The words of a command line whose flags can be read and replaced: --flag VALUE or --flag=VALUE."""

    def __init__(self, words):
        self.words = list(words)

    def get(self, *names, default=None):
        for i, word in enumerate(self.words):
            if word in names and i + 1 < len(self.words):
                return self.words[i + 1]
            if word.split("=", 1)[0] in names and "=" in word:
                return word.split("=", 1)[1]
        return default

    def number(self, name, default):
        value = whole(self.get(name))
        return default if value is None else value

    def set(self, value, *names):
        for i, word in enumerate(self.words):
            if word in names and i + 1 < len(self.words):
                self.words[i + 1] = str(value)
                return
            if word.split("=", 1)[0] in names and "=" in word:
                self.words[i] = f"{word.split('=', 1)[0]}={value}"
                return
        self.words += [names[0], str(value)]

    def remove(self, name):
        for i, word in enumerate(self.words):
            if word == name or word.startswith(name + "="):
                del self.words[i:i + (2 if word == name else 1)]
                return


def layout_for(command, slots):
    """(ranks, dp) of the largest data parallelism that fits, or None."""
    tp, cp, pp = (max(1, command.number(flag, 1)) for flag in ("--tp", "--cp", "--pp"))
    copy, batch = tp * cp * pp, command.number("--global-batch", 16)
    micro = command.number("--micro-batch", 1 if pp > 1 else 0)
    shard = command.number("--hybrid-shard", 0)
    ranks = whole(command.get(*LAUNCHER_COUNT))
    for dp in range(min(min(slots, ranks) // copy, batch), 0, -1):
        divides = batch % (dp * micro) == 0 if micro else batch % dp == 0
        if divides and (shard in (0, 1) or dp * cp % shard == 0 or shard >= dp * cp):
            return copy * dp, dp
    return None

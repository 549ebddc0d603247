"""When each warp ran and where it waited, as text or as an SVG picture."""


class Timeline:
    """Time is the number of instructions run by the whole machine."""

    def __init__(self):
        self.waits = []  # (warp, from, to, what, line)
        self.open = {}
        self.end = 0

    def wait(self, now, warp, wait):
        key = (warp.cta.number, warp.index)
        self.end = now
        if key not in self.open:
            self.open[key] = (now, wait.what, warp.at.line)

    def go(self, now, warp):
        self.end = now
        if self.open:
            key = (warp.cta.number, warp.index)
            if key in self.open:
                start, what, line = self.open.pop(key)
                self.waits.append((key, start, now, what, line))

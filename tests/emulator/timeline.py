"""Which warp waited where: a picture of one run, as text or SVG.

Time is logical and does not depend on the schedule. A warp's clock counts its instructions; an asynchronous operation
ends LATENCY after it was issued, or after the one that it had to follow; a warp that waits for a barrier continues at
the time of the last arrival. This shows the shape of a pipeline, not the speed of a GPU.
"""

from collections import Counter
from xml.sax.saxutils import escape

LATENCY = {"cp.async": 300, "cp.reduce": 300, "tcgen05.mma": 60, "tcgen05.cp": 20, "tcgen05.ld": 20, "wgmma": 60}


def latency(opcode):
    return next((time for start, time in LATENCY.items() if opcode.startswith(start)), 0)


class Timeline:
    def __init__(self):
        self.waits = []  # (CTA, warp, from, to, what, line)

    def wait(self, warp, until, what):
        """The warp continues at `until`, if that is later than its own time."""
        if until > warp.clock:
            self.waits.append((warp.cta.number, warp.index, warp.clock, until, what, warp.at.line))
            warp.clock = until

    def rows(self, machine, ctas):
        """[(name, end, waits)] of the warps of the first CTAs."""
        ends = {key: clock for key, clock in machine.ends.items() if key[0] < ctas}
        return [
            (f"CTA {key[0]} warp {key[1]}", end, [w[2:] for w in self.waits if w[:2] == key])
            for key, end in sorted(ends.items())
        ]

    def text(self, machine, ctas=1, width=100):
        """One line per warp, where # runs and . waits; then the places with the longest waits."""
        rows = self.rows(machine, ctas)
        total = max([end for _, end, _ in rows], default=1) or 1
        lines = [f"0 {'-' * (width + 10)} {total} (instructions; # runs, . waits)"]
        for name, end, waits in rows:
            cells = ["#" if i * total < end * width else " " for i in range(width)]
            for start, stop, _, _ in waits:
                for i in range(start * width // total, max(start * width // total + 1, stop * width // total)):
                    if i < width and stop - start > total // width // 2:
                        cells[i] = "."
            lines.append(
                f"{name:14} {''.join(cells)} {sum(w[1] - w[0] for w in waits) * 100 // max(end, 1):3}% waiting"
            )
        time, count = Counter(), Counter()
        for _, _, waits in rows:
            for start, stop, what, line in waits:
                time[line, what] += stop - start
                count[line, what] += 1
        lines += [f"{time[key]:8} in {count[key]:4} waits  line {key[0]}: {key[1]}" for key, _ in time.most_common(12)]
        return "\n".join(lines)

    def svg(self, machine, ctas=1, width=1200):
        """Bars of running time, lighter where the warp waits; the line and the reason show under the pointer."""
        rows = self.rows(machine, ctas)
        total = max([end for _, end, _ in rows], default=1) or 1
        scale = width / total
        bar = lambda x, y, w, color, hint: (
            f'<rect x="{110 + x * scale:.1f}" y="{y}" width="{max(w * scale, 0.3):.1f}" height="14" fill="{color}">'
            f"<title>{escape(hint)}</title></rect>"
        )
        parts = []
        for row, (name, end, waits) in enumerate(rows):
            y = 10 + 20 * row
            parts.append(f'<text x="4" y="{y + 11}">{name}</text>')
            parts.append(bar(0, y, end, "#3b6fb6", f"{name}: {end} instructions and waits"))
            for start, stop, what, line in waits:
                parts.append(bar(start, y, stop - start, "#f0c987", f"line {line}: waits {stop - start} for {what}"))
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width + 130}" height="{20 * len(rows) + 20}" '
            f'font-family="sans-serif" font-size="11">{"".join(parts)}</svg>'
        )

"""The share of held-out prompts that runs answer right, at temperature 1, after each exported step.

python examples/rl/measure.py learning.svg GRPO=runs/rl/weights DPO=runs/rl/dpo_weights
"""

import argparse
from pathlib import Path

import sorting
from engine import Engine, exports

PROMPTS = 1024
STYLE = """text{font:14px system-ui,sans-serif;fill:#24292f}.b{font-weight:700}.e{text-anchor:end}
.s{stroke:#d55e00}.h{stroke:#0072b2}polyline{fill:none;stroke-width:2.5}.g{stroke:#8c959f55}
@media(prefers-color-scheme:dark){text{fill:#e6edf3}.s{stroke:#ff8c42}.h{stroke:#58a6ff}}"""


def shares(folder):
    """Steps, and the share of right answers at temperature 1 after each."""
    words, engine = sorting.words(PROMPTS, seed=1, held_out=True), None
    for step, weights in exports(folder):
        engine = engine or Engine(weights)
        engine.load(weights)
        answers = engine.answers(words, seed=0)
        rewards = [sorting.reward(*x) for x in zip(words, answers, strict=True)]
        yield step, sum(rewards) / PROMPTS


def picture(curves):
    """An SVG file of shares over steps, which has the numbers as comments."""
    last = max(step for points in curves.values() for step, _ in points)

    def place(step, share):
        return f"{60 + 620 * step / last:.0f},{280 - 240 * share:.0f}"

    yield '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 760 330" role="img">'
    names = " and ".join(curves)
    yield f"<title>Share of right answers to held-out prompts, over the steps of {names}</title>"
    yield f"<style>{STYLE}</style>"
    yield '<text x="8" y="20" class="b">Share of held-out words whose letters are in order</text>'
    for share in (0, 0.25, 0.5, 0.75, 1):
        y = 280 - 240 * share
        yield f'<path class="g" d="M60 {y:g}H680"/>'
        yield f'<text x="50" y="{y + 5:g}" class="e">{share:g}</text>'
    for step in range(0, last + 1, 20):
        x = 60 + 620 * step / last
        yield f'<text x="{x:.0f}" y="302" text-anchor="middle">{step}</text>'
    yield '<text x="370" y="324" text-anchor="middle">step</text>'
    for number, (name, points) in enumerate(curves.items()):
        colour = "sh"[number % 2]
        line = " ".join(place(*point) for point in points)
        y = 181 + 22 * number
        yield f"<!-- {name}: {' '.join(f'{step}:{share:.3f}' for step, share in points)} -->"
        yield f'<polyline class="{colour}" points="{line}"/>'
        yield f'<polyline class="{colour}" points="540,{y} 565,{y}"/>'
        yield f'<text x="575" y="{y + 5}">{name}: {points[-1][1]:.2f}</text>'
    yield "</svg>"


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("curves", nargs="+", metavar="NAME=FOLDER")
    options = parser.parse_args()
    curves = {}
    for curve in options.curves:
        name, _, folder = curve.partition("=")
        curves[name] = [*shares(Path(folder))]
        print(name, " ".join(f"{step}:{share:.3f}" for step, share in curves[name]))
    options.out.write_text("\n".join(picture(curves)) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

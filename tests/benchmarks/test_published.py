"""What others published, against the planner: the table of docs/planner.md."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import published
from benchmarks.published import CUDNN, FLASH_2, NEAR, OF_NEMO, OF_SDPA, Row, all_rows, table
from trainer.planner.hardware import find_gpu

PAGE = Path(__file__).parents[2] / "docs" / "planner.md"


def rows_of(name) -> list[Row]:
    return [row for row in all_rows() if row.source.name == name]


def test_page_has_the_printed_table_and_count(capsys):
    published.main()
    printed = capsys.readouterr().out.splitlines()
    assert printed == table(all_rows())
    page = PAGE.read_text()
    assert "\n".join(printed[:-2]) in page
    near, numbers = map(int, re.findall(r"\d+", printed[-1])[:2])
    assert printed[-1] in " ".join(page.split())
    ratios = [row.ratio for row in all_rows() if row.ratio is not None]
    assert (near, numbers) == (sum(abs(x - 1) <= NEAR for x in ratios), len(ratios))


def test_ratios_on_the_page_are_those_of_its_numbers():
    """But for the rounding of three digits."""
    lines = [x for x in PAGE.read_text().splitlines() if x.startswith("| [")]
    for line in lines:
        *_, theirs, _, kernels, ratios = (x.split(", ") for x in line.strip("| ").split(" | "))
        for printed, predicted, ratio in zip(theirs, kernels, ratios, strict=True):
            if printed != "none":
                assert float(ratio) == pytest.approx(float(predicted) / float(printed), abs=0.01)


def test_page_names_what_is_off_in_each_row_that_is_not_close():
    _, _, text = PAGE.read_text().partition("What is off:")
    far = [row for row in all_rows() if not row.is_near]
    assert len(far) == 5
    for row in far:
        assert row.source.name in text or row.case.partition("-")[0] in text


def test_at_least_six_rows_that_no_factor_is_fitted_to_are_close():
    near = [row for row in all_rows() if row.is_near and row.source.name != "TRL"]
    assert len(near) >= 6


def test_steps_and_rates_that_were_published_together_agree():
    """Pages that count the pairs of a causal mask: 389, 34.1 and 142 TFLOP/s."""
    for name, index, rate, rel in (
        ("NeMo Automodel", 0, 389, 0.01),
        ("Megatron-Bridge", 1, 34.1, 0.01),
        ("Megatron-Bridge", 0, 142.06, 0.07),
    ):
        row = rows_of(name)[index]
        tokens = row.seq_len * row.rows * row.parts
        flops = row.model.flops_per_token(row.seq_len) * tokens
        seconds = row.published or 0.0
        assert flops / row.num_gpus / seconds / 1e12 == pytest.approx(rate, rel=rel)


def test_flops_of_nemo_count_all_pairs():
    row = rows_of("NeMo")[0]
    width, mlp, layers, vocab = 4096, 11_008, 32, 32_000
    formula = 24 * width**2 + 18 * width * mlp + 12 * width * row.seq_len
    tokens = row.seq_len * row.rows * row.parts
    assert tokens == 4 * 2**20
    assert row.flops == pytest.approx((layers * formula + 6 * vocab * width) * tokens)


def test_accumulation_repeats_all_but_the_update():
    row = replace(rows_of("NeMo")[0], unit="s")
    one, two = (replace(row, parts=x).theirs for x in (1, 2))
    assert one < two < 2 * one
    assert replace(row, parts=3).theirs - two == pytest.approx(two - one)


def test_each_unit_and_a_step_that_does_not_fit():
    ours = rows_of("Hugging Face")
    assert {row.unit for row in all_rows()} == {"s", "TFLOP/s", "GiB"}
    (last,) = (row for row in ours if row.published is None)
    assert last.is_near
    assert last.ratio is None
    assert not replace(last, gpu="h200").is_near
    # Logits of 2 + 3 * 4 bytes in place of two float32 arrays; the moments are on the GPU.
    kept = replace(last, keeps_optimizer=False)
    logits = 131_072 // 4 * 151_936
    assert (kept.theirs - kept.ours) * 2**30 == pytest.approx(6 * logits)
    assert (last.theirs - kept.theirs) * 2**30 > 4 * last.model.elements / 4


def test_rates_of_kernels_are_those_of_their_sources():
    gpu = find_gpu("h100")
    rates = [
        kernels.on(gpu).attention_efficiency(2**14, 128, backward=backward) * gpu.peak_flops
        for kernels in (CUDNN, OF_NEMO, OF_SDPA)
        for backward in (False, True)
    ]
    assert rates == pytest.approx([595e12, 516e12, 370e12, 322e12, 297.5e12, 258e12])
    assert OF_NEMO.on(gpu).matrix_efficiency == pytest.approx(0.7 * 1453.4 / 794.5)
    assert FLASH_2.keys() == {128}

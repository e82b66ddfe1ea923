"""Memory of the loss: the size of its chunks and what a step holds at one time."""

import pytest
import torch
from linear_kl_cases import MASK, random_hidden

from mrp_trainer import linear_kl
from mrp_trainer.benchmarks.loss import peak_memory
from mrp_trainer.losses.linear_kl import auto_chunk_rows, linear_kl_and_choice


def forward_peak(rows, vocab_size, hidden, chunk_rows, dtype=torch.float32, choose=False):
    h_student, h_teacher, weight = random_hidden(rows, vocab_size, hidden, dtype=dtype)
    h_student.requires_grad_()

    def step():
        if choose:
            kl, choice = linear_kl_and_choice(h_student, h_teacher, weight, MASK, chunk_rows=chunk_rows)
            (kl + choice.log_prob).sum().backward()
        else:
            linear_kl(h_student, h_teacher, weight, chunk_rows=chunk_rows).sum().backward()

    # on CPUs with AMX oneDNN's bf16 products pack the weight into scratch memory, which does not belong to the loss
    with torch.backends.mkldnn.flags(enabled=dtype != torch.bfloat16):
        return peak_memory(step)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chunk_rows", [1, 16])
@pytest.mark.parametrize("choose", [False, True])
def test_loss_takes_at_most_24_bytes_per_element_of_a_chunk(dtype, chunk_rows, choose):
    vocab_size, hidden, rows = 20000, 8, 32
    per_row = 4 * hidden * 4 * rows + 2 * hidden * 4 * chunk_rows  # gradients and stacked hidden states
    peak = forward_peak(rows, vocab_size, hidden, chunk_rows, dtype, choose)
    assert peak - per_row <= 24 * chunk_rows * vocab_size


@pytest.mark.parametrize(
    ("vocab_size", "dtype", "rows"),
    [
        (151936, None, 768),  # of 883
        (151936, torch.float32, 256),  # of 441
        (2**19 + 1, None, 255),  # no whole multiple fits
        (2**28, None, 1),
    ],
)
def test_chunks_on_a_gpu_are_whole_tiles_for_any_number_of_rows(vocab_size, dtype, rows):
    weight = torch.empty(vocab_size, 2, dtype=torch.bfloat16, device="meta")  # treated like a GPU
    assert {auto_chunk_rows(n, weight, dtype) for n in (0, 1, 700, 883, 12345)} == {rows}


def test_chunks_on_a_cpu_have_about_equal_sizes():
    weight = torch.empty(3 * 2**12, 2)
    assert [auto_chunk_rows(n, weight) for n in (0, 1, 1024, 1025, 4000)] == [1, 1, 1024, 513, 1000]


def test_memory_grows_only_with_hidden_states_and_halves_with_the_chunk():
    vocab_size, hidden = 20000, 8
    few, many = forward_peak(32, vocab_size, hidden, 8), forward_peak(256, vocab_size, hidden, 8)
    assert 0 < many - few <= 4 * (256 - 32) * hidden * 4  # a few [N, H] tensors, nothing of size N * V
    whole, half = forward_peak(64, vocab_size, hidden, 32), forward_peak(64, vocab_size, hidden, 16)
    assert whole / half == pytest.approx(2, rel=0.05)

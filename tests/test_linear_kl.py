"""The residual loss against float64 formulas, golden data and its own laws, for both row functions.

Triton's interpreter must be chosen before triton is imported, so the "triton" cases on a CPU exist only in a process
of their own: `test_kernels_pass_in_the_interpreter` runs this file again with TRITON_INTERPRET=1.
"""

import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from mrp_trainer import linear_kl
from mrp_trainer.benchmarks.loss import peak_memory
from mrp_trainer.losses.linear_kl import Choice, auto_chunk_rows, linear_kl_and_choice

GOLDEN = Path(__file__).parent / "golden"
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
MASK = 7

on_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
IMPLEMENTATIONS = [
    pytest.param(("torch", "cpu"), id="torch"),
    *([pytest.param(("triton", "cpu"), id="triton")] if INTERPRETED else []),
    pytest.param(("triton", "cuda"), id="triton-cuda", marks=on_gpu),
]


class Implementation:
    """linear_kl with one backend on one device; inputs are moved there and results back."""

    def __init__(self, backend: str, device: str):
        self.backend, self.device = backend, device

    def kl(self, h_student, h_teacher, weight, **options):
        moved = (tensor.detach().to(self.device) for tensor in (h_student, h_teacher, weight))
        return linear_kl(*moved, backend=self.backend, **options).cpu()

    def kl_and_gradient(self, h_student, h_teacher, weight, **options):
        h_student = h_student.detach().to(self.device).requires_grad_()
        kl = linear_kl(h_student, h_teacher.to(self.device), weight.to(self.device), backend=self.backend, **options)
        (gradient,) = torch.autograd.grad(kl.sum(), h_student)
        return kl.detach().cpu(), gradient.cpu()


@pytest.fixture(params=IMPLEMENTATIONS)
def ours(request):
    return Implementation(*request.param)


def exact_kl_and_gradient(h_student, h_teacher, weight, temperature=1.0):
    """The definition in float64, and its gradient by autograd."""
    h_student = h_student.detach().double().requires_grad_()
    weight = weight.double()
    teacher = F.log_softmax(h_teacher.double() @ weight.t() / temperature, dim=-1)
    student = F.log_softmax(h_student @ weight.t() / temperature, dim=-1)
    kl = temperature**2 * F.kl_div(student, teacher, log_target=True, reduction="none").sum(-1)
    (gradient,) = torch.autograd.grad(kl.sum(), h_student)
    return kl.detach(), gradient


def random_hidden(rows, vocab_size, hidden=32, change=0.1, dtype=torch.float32, logit_scale=3.0, seed=0):
    """h_student, h_teacher, weight; the KL is about (logit_scale * change)^2 / 2."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(vocab_size, hidden, generator=generator) * logit_scale / hidden**0.5
    h_teacher = torch.randn(rows, hidden, generator=generator)
    h_student = h_teacher + change * torch.randn(rows, hidden, generator=generator)
    return h_student.to(dtype), h_teacher.to(dtype), weight.to(dtype)


def relative_error(value, expected):
    return ((value.double() - expected).norm() / expected.norm()).item()


def test_gradcheck_in_float64():
    h_student, h_teacher, weight = random_hidden(5, 23, hidden=6, change=0.7, dtype=torch.float64)
    for temperature in (0.5, 1.0, 2.0):
        assert torch.autograd.gradcheck(
            lambda h, t=temperature: linear_kl(h, h_teacher, weight, temperature=t, chunk_rows=2),
            h_student.requires_grad_(),
            atol=1e-8,
        )


@pytest.mark.parametrize("name", ["block4", "block8-tied"])
def test_golden_loss_and_gradient(ours, name):
    expected = {key: value for key, value in load_file(GOLDEN / name / "expected.safetensors").items()}
    tensors = load_file(GOLDEN / name / "model.safetensors")
    weight = tensors.get("lm_head.weight", tensors["model.embed_tokens.weight"]).float()
    masked, revealed = expected["train.masked"].bool(), expected["train.reveal"].bool()
    supervised = masked & ~revealed & (expected["train.labels"] != -100)  # [2, L]
    row_weight = (1 / expected["train.p_mask"])[:, None].expand_as(supervised)[supervised]
    h_student = (expected["train.hidden_t"] + expected["train.residual_hidden"])[supervised]

    kl, gradient = ours.kl_and_gradient(h_student, expected["train.hidden_next"][supervised], weight)
    uncorrected = ours.kl(expected["train.hidden_t"][supervised], expected["train.hidden_next"][supervised], weight)
    loss = (kl * row_weight).sum() / expected["train.normaliser"]
    full_gradient = torch.zeros_like(expected["train.grad_residual_hidden"])
    full_gradient[supervised] = gradient * row_weight[:, None] / expected["train.normaliser"]

    assert relative_error(kl, expected["train.kl_per_token"][supervised].double()) < 1e-5
    assert relative_error(uncorrected, expected["train.kl_uncorrected_per_token"][supervised].double()) < 1e-5
    assert loss.item() == pytest.approx(expected["train.loss"].item(), rel=1e-5)
    assert relative_error(full_gradient, expected["train.grad_residual_hidden"].double()) < 1e-5


@pytest.mark.parametrize(
    ("vocab_size", "change"), [(97, 0.03), (97, 1.0), (1000, 0.03), (1000, 1.0), (151669, 0.1), (151936, 0.1)]
)
def test_float32_is_close_to_float64(ours, vocab_size, change):
    inputs = random_hidden(3, vocab_size, change=change)
    kl, gradient = ours.kl_and_gradient(*inputs)
    exact_kl, exact_gradient = exact_kl_and_gradient(*inputs)
    assert kl.dtype == torch.float32
    torch.testing.assert_close(kl.double(), exact_kl, rtol=5e-5, atol=0)
    assert relative_error(gradient, exact_gradient) < 3e-4


def test_loss_is_exact_far_below_rounding_of_the_logits(ours):
    """At a KL of 1e-7, exp(r) - 1 - r is a difference of numbers ten thousand times as large as itself."""
    inputs = random_hidden(8, 1000, change=2e-4)
    exact_kl, _ = exact_kl_and_gradient(*inputs)
    assert 5e-8 < exact_kl.mean() < 5e-7
    torch.testing.assert_close(ours.kl(*inputs).double(), exact_kl, rtol=2e-5, atol=0)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_temperature_scales_logits_and_loss(ours, temperature):
    inputs = random_hidden(4, 1000, change=0.3)
    kl, gradient = ours.kl_and_gradient(*inputs, temperature=temperature)
    exact_kl, exact_gradient = exact_kl_and_gradient(*inputs, temperature)
    torch.testing.assert_close(kl.double(), exact_kl, rtol=5e-5, atol=0)
    assert relative_error(gradient, exact_gradient) < 3e-4


def test_bf16_gradient_survives_where_two_logit_tensors_lose_it(ours):
    """The control is generous: only the finished logits are rounded, all else is float64."""
    h_student, h_teacher, weight = random_hidden(64, 4000, hidden=64, change=0.02, logit_scale=5.0)
    h_teacher, weight = h_teacher.bfloat16(), weight.bfloat16()
    exact_kl, exact_gradient = exact_kl_and_gradient(h_student, h_teacher, weight)
    assert 2e-3 < exact_kl.mean() < 8e-3
    _, gradient = ours.kl_and_gradient(h_student, h_teacher, weight)
    assert relative_error(gradient, exact_gradient) < 5e-2

    rounded = [(h.double() @ weight.double().t()).bfloat16() for h in (h_student, h_teacher)]
    student, teacher = (F.softmax(logits.double(), dim=-1) for logits in rounded)
    control = (student - teacher) @ weight.double()
    assert relative_error(control, exact_gradient) > 0.3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equal_inputs_give_exactly_nothing(ours, dtype):
    _, h_teacher, weight = random_hidden(5, 5000, dtype=dtype)
    kl, gradient = ours.kl_and_gradient(h_teacher, h_teacher, weight)
    assert torch.equal(kl, torch.zeros(5))
    assert torch.equal(gradient, torch.zeros_like(h_teacher))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("logit_scale", [3.0, 1e4])
def test_never_negative(ours, dtype, logit_scale):
    for change in (1e-7, 1e-5, 1e-3, 1e-2, 0.1, 1.0, 10.0):
        h_student, h_teacher, weight = random_hidden(16, 500, change=change, logit_scale=logit_scale)
        kl = ours.kl(h_student, h_teacher.to(dtype), weight.to(dtype))
        assert (kl >= 0).all(), f"change {change}: {kl.min()}"
        assert kl.isfinite().all()


def test_logits_times_ten_thousand(ours):
    """A common shift of 1e4 or a one-hot teacher must neither overflow nor lose the loss."""
    inputs = random_hidden(16, 1000, change=0.5, logit_scale=3e4)
    kl, gradient = ours.kl_and_gradient(*inputs)
    exact_kl, exact_gradient = exact_kl_and_gradient(*inputs)
    assert gradient.isfinite().all()
    # float32 logits of 1e5 are good to 1e-2, so is the loss
    torch.testing.assert_close(kl.double(), exact_kl, rtol=1e-4, atol=2e-2)
    assert relative_error(gradient, exact_gradient) < 2e-2


@pytest.mark.parametrize("rows", [1, 12])
def test_chunk_size_does_not_matter(ours, rows):
    inputs = random_hidden(rows, 300, change=0.5)
    whole_kl, whole_gradient = ours.kl_and_gradient(*inputs)
    for chunk_rows in (1, 7, max(1, rows - 1), rows, 2 * rows):
        kl, gradient = ours.kl_and_gradient(*inputs, chunk_rows=chunk_rows)
        torch.testing.assert_close(kl, whole_kl, rtol=1e-5, atol=0)
        torch.testing.assert_close(gradient, whole_gradient, rtol=1e-4, atol=1e-6)


def test_tiles_of_the_pytorch_path_do_not_matter(monkeypatch):
    """A tile of 2 rows, chunks of 5: every chunk ends in a shorter tile."""
    inputs = random_hidden(12, 300, change=0.5)
    implementation = Implementation("torch", "cpu")
    whole_kl, whole_gradient = implementation.kl_and_gradient(*inputs)
    monkeypatch.setitem(import_module("mrp_trainer.losses.linear_kl").TILE_ELEMENTS, "cpu", 700)
    kl, gradient = implementation.kl_and_gradient(*inputs, chunk_rows=5)
    torch.testing.assert_close(kl, whole_kl, rtol=1e-5, atol=0)
    torch.testing.assert_close(gradient, whole_gradient, rtol=1e-4, atol=1e-6)


def test_no_rows(ours):
    _, _, weight = random_hidden(1, 50)
    kl, gradient = ours.kl_and_gradient(torch.empty(0, 32), torch.empty(0, 32), weight)
    assert kl.shape == (0,) and gradient.shape == (0, 32)


def test_suppressed_ids_are_left_out_of_both_distributions(ours):
    h_student, h_teacher, weight = random_hidden(4, 60, change=0.5)
    suppressed = [0, 17, 59]
    kept = [token for token in range(60) if token not in suppressed]
    kl, gradient = ours.kl_and_gradient(h_student, h_teacher, weight, suppress_ids=suppressed)
    exact_kl, exact_gradient = exact_kl_and_gradient(h_student, h_teacher, weight[kept])
    torch.testing.assert_close(kl.double(), exact_kl, rtol=5e-5, atol=0)
    assert relative_error(gradient, exact_gradient) < 3e-4
    assert torch.equal(kl, ours.kl(h_student, h_teacher, weight, suppress_ids=torch.tensor(suppressed)))


def test_padded_vocabulary_rows_are_not_read(ours):
    h_student, h_teacher, weight = random_hidden(4, 50, change=0.5)
    padded = torch.cat([weight, torch.full((14, 32), torch.nan)])
    kl, gradient = ours.kl_and_gradient(h_student, h_teacher, padded, vocab_size=50, suppress_ids=[3, 51])
    expected_kl, expected_gradient = ours.kl_and_gradient(h_student, h_teacher, weight, suppress_ids=[3])
    assert torch.equal(kl, expected_kl)
    assert torch.equal(gradient, expected_gradient)


def test_everything_suppressed_gives_nothing(ours):
    kl, gradient = ours.kl_and_gradient(*random_hidden(3, 40), suppress_ids=range(40))
    assert torch.equal(kl, torch.zeros(3))
    assert torch.equal(gradient, torch.zeros(3, 32))


def test_token_ruled_out_by_the_student_alone_costs_infinity(ours):
    """Token 0 has a weight so large that the student's logit overflows to -inf where its h differs."""
    h_student, h_teacher, weight = random_hidden(3, 40)
    h_teacher[:, 0] = h_student[:, 0] = 0
    weight[0] = 0
    weight[0, 0] = 3e38
    h_student[1, 0] = -10
    kl = ours.kl(h_student, h_teacher, weight)
    assert kl[1] == torch.inf
    assert kl[[0, 2]].isfinite().all()


def test_nan_stays_in_its_row(ours):
    h_student, h_teacher, weight = random_hidden(6, 300)
    clean_kl, clean_gradient = ours.kl_and_gradient(h_student, h_teacher, weight)
    h_student[1, 3] = torch.nan
    h_teacher[4, 0] = torch.nan
    kl, gradient = ours.kl_and_gradient(h_student, h_teacher, weight)
    others = [0, 2, 3, 5]
    assert kl[[1, 4]].isnan().all() and gradient[[1, 4]].isnan().all()
    assert torch.equal(kl[others], clean_kl[others])
    assert torch.equal(gradient[others], clean_gradient[others])


def test_non_contiguous_inputs(ours):
    h_student, h_teacher, weight = random_hidden(6, 80, change=0.5)
    expected_kl, expected_gradient = ours.kl_and_gradient(h_student, h_teacher, weight)
    wide = torch.empty(6, 64)
    wide[:, ::2] = h_student
    strided = wide[:, ::2], h_teacher.t().contiguous().t(), weight.t().contiguous().t()
    assert not any(tensor.is_contiguous() for tensor in strided)
    kl, gradient = ours.kl_and_gradient(*strided)
    torch.testing.assert_close(kl, expected_kl)
    torch.testing.assert_close(gradient, expected_gradient)


def test_only_the_student_gets_a_gradient():
    h_student, h_teacher, weight = (tensor.requires_grad_() for tensor in random_hidden(3, 40))
    linear_kl(h_student, h_teacher, weight).sum().backward()
    assert h_student.grad is not None and h_student.grad.abs().sum() > 0
    assert weight.grad is None
    assert h_teacher.grad is None


def test_row_weights_and_normaliser_reach_the_gradient(ours):
    h_student, h_teacher, weight = random_hidden(5, 40, change=0.5)
    row_weight = torch.tensor([0.0, 1.0, 2.5, 10.0, 1e-3])
    leaf = h_student.detach().to(ours.device).requires_grad_()
    kl = linear_kl(leaf, h_teacher.to(ours.device), weight.to(ours.device), backend=ours.backend)
    ((kl * row_weight.to(ours.device)).sum() / 7).backward()
    _, row_gradient = exact_kl_and_gradient(h_student, h_teacher, weight)
    torch.testing.assert_close(leaf.grad.cpu().double(), row_gradient * row_weight[:, None] / 7, rtol=1e-3, atol=1e-6)


def test_float32_student_with_bf16_weight_gets_a_float32_gradient():
    h_student, h_teacher, weight = random_hidden(3, 40)
    h_student.requires_grad_()
    linear_kl(h_student, h_teacher.bfloat16(), weight.bfloat16()).sum().backward()
    assert h_student.grad.dtype == torch.float32


def test_autocast_changes_nothing():
    inputs = random_hidden(3, 40)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = linear_kl(*inputs)
    assert torch.equal(inside, linear_kl(*inputs))


def forward_peak(rows, vocab_size, hidden, chunk_rows, dtype=torch.float32, choose=False):
    h_student, h_teacher, weight = random_hidden(rows, vocab_size, hidden, dtype=dtype)
    h_student.requires_grad_()

    def step():
        if choose:
            kl, choice = linear_kl_and_choice(h_student, h_teacher, weight, MASK, chunk_rows=chunk_rows)
            (kl + choice.log_prob).sum().backward()
        else:
            linear_kl(h_student, h_teacher, weight, chunk_rows=chunk_rows).sum().backward()

    # on CPUs with AMX oneDNN's bf16 products pack the weight into scratch memory, which is none of the loss's own
    with torch.backends.mkldnn.flags(enabled=dtype != torch.bfloat16):
        return peak_memory(step)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chunk_rows", [1, 16])
@pytest.mark.parametrize("choose", [False, True])
def test_at_most_24_bytes_per_element_of_a_chunk(dtype, chunk_rows, choose):
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
def test_chunks_of_a_gpu_are_whole_tiles_whatever_the_number_of_rows(vocab_size, dtype, rows):
    weight = torch.empty(vocab_size, 2, dtype=torch.bfloat16, device="meta")  # taken for a GPU
    assert {auto_chunk_rows(n, weight, dtype) for n in (0, 1, 700, 883, 12345)} == {rows}


def test_chunks_of_a_cpu_are_of_about_equal_size():
    weight = torch.empty(3 * 2**12, 2)
    assert [auto_chunk_rows(n, weight) for n in (0, 1, 1024, 1025, 4000)] == [1, 1, 1024, 513, 1000]


def test_memory_grows_with_rows_as_their_hidden_states_and_halves_with_the_chunk():
    vocab_size, hidden = 20000, 8
    few, many = forward_peak(32, vocab_size, hidden, 8), forward_peak(256, vocab_size, hidden, 8)
    assert 0 < many - few <= 4 * (256 - 32) * hidden * 4  # a few [N, H] tensors, nothing of size N * V
    whole, half = forward_peak(64, vocab_size, hidden, 32), forward_peak(64, vocab_size, hidden, 16)
    assert whole / half == pytest.approx(2, rel=0.05)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"h_student": torch.zeros(2, 3, 4)}, "h_student must be a floating-point matrix"),
        ({"h_teacher": torch.zeros(2, 8, dtype=torch.long)}, "h_teacher must be a floating-point matrix"),
        ({"h_teacher": torch.zeros(3, 8)}, "must have the same shape"),
        ({"weight": torch.zeros(5, 7)}, r"weight must be \[V, 8\]"),
        ({"temperature": 0.0}, "temperature must be a finite number above 0, got 0.0"),
        ({"temperature": float("nan")}, "temperature"),
        ({"vocab_size": 0}, "vocab_size must be from 1 to 5"),
        ({"vocab_size": 6}, "vocab_size must be from 1 to 5"),
        ({"suppress_ids": [5]}, r"suppress_ids must lie in \[0, 5\)"),
        ({"suppress_ids": [-1]}, "suppress_ids"),
        ({"suppress_ids": [0.5]}, "suppress_ids must be a flat list of token ids"),
        ({"chunk_rows": 0}, "chunk_rows must be"),
        ({"chunk_rows": "big"}, "chunk_rows must be"),
        ({"backend": "cuda"}, "backend must be one of auto, torch, triton"),
    ],
)
def test_bad_arguments_are_named(change, message):
    arguments = {"h_student": torch.zeros(2, 8), "h_teacher": torch.zeros(2, 8), "weight": torch.zeros(5, 8)} | change
    with pytest.raises(ValueError, match=message):
        linear_kl(**arguments)


@pytest.mark.skipif(INTERPRETED, reason="the interpreter takes CPU tensors")
def test_triton_on_a_cpu_tensor_is_refused():
    inputs = random_hidden(2, 20)
    with pytest.raises(ValueError, match="backend='triton' cannot be used: "):
        linear_kl(*inputs, backend="triton")


def test_default_on_a_cpu_needs_no_triton():
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch; from mrp_trainer import linear_kl\n"
        "print(linear_kl(torch.ones(1, 2), torch.zeros(1, 2), torch.eye(2)).shape)\n"
        "try: linear_kl(torch.ones(1, 2), torch.zeros(1, 2), torch.eye(2), backend='triton')\n"
        "except ValueError as error: print(error)\n"
    )
    result = run_python("-c", code)
    assert result.returncode == 0, result.stderr
    assert "torch.Size([1])" in result.stdout
    assert "triton is not installed" in result.stdout


@pytest.mark.skipif(INTERPRETED, reason="this is the process that the test starts")
def test_kernels_pass_in_the_interpreter():
    pytest.importorskip("triton")
    options = ["-m", "pytest", "-q", "-p", "no:cacheprovider", __file__, "-k", "triton and not cuda and not cpu"]
    result = run_python(*options, TRITON_INTERPRET="1")
    assert result.returncode == 0, result.stdout + result.stderr
    passed = int(result.stdout.split(" passed")[0].split()[-1])
    assert passed >= 30, result.stdout


@pytest.mark.skipif(INTERPRETED, reason="interpreted kernels cannot be compiled")
@pytest.mark.parametrize("choose", [False, True])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_kernel_compiles_for_gpus_that_are_not_here(dtype, choose):
    """What only the interpreter accepts fails here: the compiler and its assembler need no device."""
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from mrp_trainer.losses.linear_kl_triton import _kl_rows_kernel

    signature = {
        "teacher_ptr": f"*{dtype}",
        "delta_ptr": f"*{dtype}",
        "kl_ptr": "*fp32",
        "token_ptr": "*i64",
        "score_ptr": "*fp32",
        "log_prob_ptr": "*fp32",
        "teacher_stride": "i64",
        "delta_stride": "i64",
        "vocab_size": "i32",
        "inverse_temperature": "fp32",
        "mask_token_id": "i32",
    }
    constants = {"BLOCK": 4096, "WRITE_GRADIENT": True, "CHOOSE": choose}
    if not choose:
        constants |= dict.fromkeys(("token_ptr", "score_ptr", "log_prob_ptr", "mask_token_id"))
    source = ASTSource(_kl_rows_kernel, signature | dict.fromkeys(constants, "constexpr"), constexprs=constants)
    for capability in (80, 90):
        compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 8})
        assert len(compiled.asm["cubin"]) > 0


# --- the teacher's choice from the same logits


def exact_choice(h_student, h_teacher, weight, mask_token_id):
    """token, score, log_prob by the definition in float64."""
    student, teacher = (
        (hidden.double() @ weight.double().t()).index_fill(1, torch.tensor([mask_token_id]), -torch.inf)
        for hidden in (h_student, h_teacher)
    )
    score, token = F.log_softmax(teacher, dim=-1).max(-1)
    return token, score, F.log_softmax(student, dim=-1).gather(1, token[:, None])[:, 0]


def choice_of(ours, h_student, h_teacher, weight, **options):
    """KL, choice and the gradients of both sums, on the CPU."""
    h_student, h_teacher, weight = (tensor.detach().to(ours.device) for tensor in (h_student, h_teacher, weight))
    h_student.requires_grad_()
    kl, choice = linear_kl_and_choice(h_student, h_teacher, weight, MASK, backend=ours.backend, **options)
    of_kl, of_log_prob = (
        torch.autograd.grad(value.sum(), h_student, retain_graph=True)[0] for value in (kl, choice.log_prob)
    )
    return kl.detach().cpu(), Choice(*(field.detach().cpu() for field in choice)), of_kl.cpu(), of_log_prob.cpu()


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("vocab_size", [97, 5000])
def test_the_choice_is_that_of_the_definition_and_the_kl_is_that_of_linear_kl(ours, vocab_size, temperature):
    h_student, h_teacher, weight = random_hidden(9, vocab_size, change=0.5)
    weight[MASK] = 4 * h_teacher[0]  # what the first row would choose
    kl, choice, of_kl, of_log_prob = choice_of(ours, h_student, h_teacher, weight, temperature=temperature)

    exact_student = h_student.double().requires_grad_()
    token, score, log_prob = exact_choice(exact_student, h_teacher, weight, MASK)
    assert torch.equal(choice.token, token) and (h_teacher[0] @ weight.t()).argmax() == MASK
    torch.testing.assert_close(choice.score.double(), score, rtol=5e-5, atol=1e-6)
    torch.testing.assert_close(choice.log_prob.double(), log_prob.detach(), rtol=5e-5, atol=1e-6)
    (exact_gradient,) = torch.autograd.grad(log_prob.sum(), exact_student)
    assert relative_error(of_log_prob, exact_gradient) < 3e-4

    alone, of_it_alone = ours.kl_and_gradient(h_student, h_teacher, weight, temperature=temperature)
    torch.testing.assert_close(kl, alone, rtol=1e-6, atol=0)
    torch.testing.assert_close(of_kl, of_it_alone, rtol=1e-5, atol=1e-7)


def test_choice_in_bf16_is_good_to_the_rounding_of_its_logits(ours):
    inputs = random_hidden(32, 4000, hidden=64, change=0.1, dtype=torch.bfloat16)
    _, choice, _, of_log_prob = choice_of(ours, *inputs)
    exact_student = inputs[0].double().requires_grad_()
    token, best, log_prob = exact_choice(exact_student, *inputs[1:], MASK)
    rounding = 2**-8 * 16  # half a unit in the last place of a logit of 16
    of_its_token = F.log_softmax((inputs[1].double() @ inputs[2].double().t()), dim=-1).gather(
        1, choice.token[:, None]
    )
    assert (best - of_its_token[:, 0]).max() < 2 * rounding  # a token as good as the best
    same = choice.token == token
    torch.testing.assert_close(choice.score.double(), best, rtol=0, atol=2 * rounding)
    torch.testing.assert_close(choice.log_prob.double()[same], log_prob.detach()[same], rtol=0, atol=4 * rounding)
    (exact_gradient,) = torch.autograd.grad(log_prob[same].sum(), exact_student)
    assert relative_error(of_log_prob[same], exact_gradient[same]) < 5e-2


def test_a_nearly_certain_token_keeps_its_odds(ours):
    """Its logit is 19 above the others, and float32 knows it to 1e-6; as a number below 1 it would be lost."""
    h_student, h_teacher, weight = random_hidden(24, 500, change=0.02, logit_scale=1.0)
    weight[3] = 0
    weight[3, 0], h_teacher[:, 0], h_student[:, 0] = 3.0, 6.2, 6.1
    weight[:3, 0] = weight[4:, 0] = 0
    _, choice, _, of_log_prob = choice_of(ours, h_student, h_teacher, weight)
    exact_student = h_student.double().requires_grad_()
    token, score, log_prob = exact_choice(exact_student, h_teacher, weight, MASK)
    assert torch.equal(choice.token, token)
    (exact_gradient,) = torch.autograd.grad(log_prob.sum(), exact_student)
    assert relative_error(of_log_prob, exact_gradient) < 1e-4
    log_prob = log_prob.detach()
    doubt = -torch.expm1(log_prob)
    assert (doubt < 2e-5).all() and (doubt > 2e-6).all()
    for ours_, exact in ((choice.log_prob, log_prob), (choice.score, score)):
        assert (-torch.expm1(ours_.double()) / -torch.expm1(exact) - 1).abs().max() < 1e-4


@pytest.mark.parametrize("chunk_rows", [1, 5, 24])
def test_chunks_and_tiles_do_not_change_the_choice(ours, monkeypatch, chunk_rows):
    inputs = random_hidden(12, 300, change=0.5)
    whole = choice_of(ours, *inputs)
    monkeypatch.setitem(import_module("mrp_trainer.losses.linear_kl").TILE_ELEMENTS, "cpu", 700)
    kl, choice, *gradients = choice_of(ours, *inputs, chunk_rows=chunk_rows)
    assert torch.equal(choice.token, whole[1].token)
    for value, expected in zip((kl, *choice[1:], *gradients), (whole[0], *whole[1][1:], *whole[2:]), strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-6)


def test_nan_of_a_row_stays_out_of_the_choice_of_others(ours):
    h_student, h_teacher, weight = random_hidden(4, 300)
    clean = choice_of(ours, h_student, h_teacher, weight)
    h_teacher[2, 0] = torch.nan
    _, choice, _, of_log_prob = choice_of(ours, h_student, h_teacher, weight)
    others = [0, 1, 3]
    assert choice.score[2].isnan() and choice.log_prob[2].isnan() and 0 <= choice.token[2] < 300
    assert all(torch.equal(field[others], before[others]) for field, before in zip(choice, clean[1], strict=True))
    assert torch.equal(of_log_prob[others], clean[3][others])


def test_gradcheck_of_both_values_in_float64():
    h_student, h_teacher, weight = random_hidden(5, 23, hidden=6, change=0.7, dtype=torch.float64)

    def values(h):
        kl, choice = linear_kl_and_choice(h, h_teacher, weight, MASK, chunk_rows=2)
        return kl, choice.log_prob

    assert torch.autograd.gradcheck(values, h_student.requires_grad_(), atol=1e-8)


def test_mask_token_outside_the_vocabulary_is_refused():
    with pytest.raises(ValueError, match=r"mask_token_id must lie in \[0, 20\), the rows of weight; got 20"):
        linear_kl_and_choice(*random_hidden(2, 20), 20)


def run_python(*arguments, **environment):
    root = Path(__file__).parent.parent
    return subprocess.run(
        [sys.executable, *arguments],
        env=os.environ | environment,
        cwd=root,
        capture_output=True,
        text=True,
        timeout=600,
    )

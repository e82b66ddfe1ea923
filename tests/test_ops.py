"""The read of logits against its definition in double precision, and the Triton kernels against the reference.

The kernels run in Triton's interpreter (in a process of their own, since Triton decides that when it is imported), go
through its compiler, and run on a GPU where there is one.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from plain_loop import hash_key

from modeling_mrp.keyed_noise import keyed_gumbel
from modeling_mrp.ops import read_logits
from modeling_mrp.ops_triton import HAS_TRITON, INTERPRETED

TESTS = Path(__file__).parent
SHAPES = [(1, 5), (3, 70), (2, 2048), (2, 2049), (4, 9001), (1, 40000)]
needs_interpreter = pytest.mark.skipif(
    not (HAS_TRITON and INTERPRETED), reason="needs Triton's interpreter: test_kernels_pass_in_the_interpreter runs it"
)


def random_logits(rows, columns, dtype=torch.float32, seed=0):
    return (torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 4).to(dtype)


def settings(rows, columns):
    """All combinations of noise, ids and an excluded column."""
    generator = torch.Generator().manual_seed(1)
    for keys in (None, torch.randint(-(2**62), 2**62, (rows,), generator=generator)):
        for ids in (None, torch.randperm(2 * columns, generator=generator)[:columns]):
            for excluded in (None, torch.tensor([2])):
                yield {"keys": keys, "token_ids": ids, "excluded": excluded}


def assert_kernel_equals_reference(rows, columns, dtype, device="cpu"):
    logits = random_logits(rows, columns, dtype)
    for setting in settings(rows, columns):
        moved = {name: value if value is None else value.to(device) for name, value in setting.items()}
        expected = read_logits(logits.clone(), temperature=0.7, with_entropy=True, backend="torch", **setting)
        found = read_logits(logits.to(device), temperature=0.7, with_entropy=True, backend="triton", **moved)
        assert torch.equal(found.token.cpu(), expected.token)
        for name in ("log_prob", "entropy", "score"):
            actual = getattr(found, name).cpu()
            torch.testing.assert_close(actual, getattr(expected, name), rtol=1e-5, atol=2e-5, msg=name)


@pytest.mark.parametrize("shape", [(3, 70), (2, 2049)])
def test_the_reading_follows_its_definition(shape):
    logits = random_logits(*shape)
    for setting in settings(*shape):
        keys, ids, excluded = setting["keys"], setting["token_ids"], setting["excluded"]
        found = read_logits(logits.clone(), temperature=0.5, with_entropy=True, **setting)
        scores = logits.double() / 0.5
        if excluded is not None:
            scores[:, excluded] = -torch.inf
        probabilities = scores.softmax(-1)
        noise = 0 if keys is None else keyed_gumbel(keys, shape[1] if ids is None else ids).double()
        column = (scores + noise).argmax(-1)
        assert torch.equal(found.token, column if ids is None else ids[column])
        chosen = probabilities.gather(1, column[:, None])[:, 0]
        entropy = -(probabilities * probabilities.clamp(min=1e-300).log()).sum(-1)
        torch.testing.assert_close(found.log_prob.double(), chosen.log(), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(found.entropy.double(), entropy, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(found.score.double(), scores.gather(1, column[:, None])[:, 0])


def test_noise_is_keyed_by_token_ids_and_not_by_columns():
    keys = torch.tensor([7, -3])
    ids = torch.tensor([4, 0, 9])
    torch.testing.assert_close(keyed_gumbel(keys, ids), keyed_gumbel(keys, 10)[:, ids], rtol=0, atol=0)
    top_bits = hash_key(-3, 9) >> 11
    uniform = torch.tensor((top_bits + 0.5) * 2.0**-53, dtype=torch.float64)
    torch.testing.assert_close(keyed_gumbel(keys, ids)[1, 2], (-(-uniform.log()).log()).float())


def test_the_first_of_equal_scores_is_chosen():
    assert read_logits(torch.tensor([[1.0, 3.0, 3.0], [2.0, 2.0, 2.0]])).token.tolist() == [1, 0]


def unusable_rows():
    logits = random_logits(4, 3000)
    logits[0, 5], logits[2, 2500] = torch.nan, torch.inf
    logits[1] = -torch.inf
    return logits


def assert_faults_show(reading):
    assert reading.log_prob.isnan().tolist() == [True, True, True, False]
    assert (reading.score == -torch.inf).tolist() == [False, True, False, False]


def test_a_row_that_allows_no_choice_has_no_probability():
    assert_faults_show(read_logits(unusable_rows()))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backend": "cuda"}, "backend must be one of auto, torch, triton, got 'cuda'"),
        ({"backend": "triton"}, "on cpu"),
    ],
)
def test_a_backend_that_cannot_run_is_refused(monkeypatch, options, message):
    monkeypatch.setattr("modeling_mrp.ops.INTERPRETED", False)
    with pytest.raises(ValueError, match=message):
        read_logits(torch.zeros(1, 2), **options)


# -- the kernels


@needs_interpreter
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
def test_triton_equals_the_reference(shape, dtype):
    assert_kernel_equals_reference(*shape, dtype)


@needs_interpreter
def test_triton_shows_rows_that_allow_no_choice():
    assert_faults_show(read_logits(unusable_rows(), backend="triton"))


@needs_interpreter
def test_triton_result_does_not_depend_on_the_splits(monkeypatch):
    logits, keys = random_logits(2, 20000), torch.tensor([5, 6])
    whole = None
    for programs in (1, 4, 512):
        monkeypatch.setattr("modeling_mrp.ops_triton.PROGRAMS", programs)
        found = read_logits(logits, keys=keys, with_entropy=True, backend="triton")
        whole = whole or found
        assert torch.equal(found.token, whole.token) and torch.equal(found.score, whole.score)
        torch.testing.assert_close(found.entropy, whole.entropy)


@needs_interpreter
def test_triton_reads_no_rows_and_rows_with_gaps():
    assert read_logits(torch.zeros(0, 9), backend="triton").token.shape == (0,)
    logits = random_logits(6, 50).T  # neither dimension is in one piece
    assert torch.equal(read_logits(logits, backend="triton").token, logits.argmax(-1))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [*SHAPES, (64, 151936)])
def test_triton_equals_the_reference_on_cuda(shape, dtype):
    assert_kernel_equals_reference(*shape, dtype, device="cuda")


def test_kernels_pass_in_the_interpreter():
    pytest.importorskip("triton")
    options = ["-m", "pytest", "-q", "-p", "no:cacheprovider", __file__, "-k", "triton and not cuda"]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    result = subprocess.run(
        [sys.executable, *options], env=environment, cwd=TESTS.parent, capture_output=True, text=True, timeout=600
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert int(result.stdout.split(" passed")[0].split()[-1]) >= 20, result.stdout


@pytest.mark.parametrize("noisy", [False, True])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_kernels_compile_for_gpus_that_are_not_present(dtype, noisy):
    """The compiler and its assembler need no device, and reject code that only the interpreter accepts."""
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from modeling_mrp.ops_triton import combine_kernel, read_kernel

    read = {
        "logits_ptr": f"*{dtype}", "excluded_ptr": "*i64", "keys_ptr": "*i64", "ids_ptr": "*i64",
        "parts_ptr": "*fp32", "best_ptr": "*i64", "stride": "i64", "columns": "i32", "per_split": "i32",
        "temperature": "fp32",
    }  # fmt: skip
    combine = {
        "parts_ptr": "*fp32", "best_ptr": "*i64", "ids_ptr": "*i64", "token_ptr": "*i64", "log_prob_ptr": "*fp32",
        "score_ptr": "*fp32", "entropy_ptr": "*fp32", "splits": "i32",
    }  # fmt: skip
    absent = {} if noisy else {"keys_ptr": None, "ids_ptr": None}
    read_constants = {"BLOCK": 2048, "EXCLUDES": True, "NOISY": noisy, "HAS_IDS": noisy} | absent
    combine_constants = {"BLOCK": 128, "HAS_IDS": noisy} | ({} if noisy else {"ids_ptr": None})
    for kernel, signature, constants in (
        (read_kernel, read, read_constants),
        (combine_kernel, combine, combine_constants),
    ):
        source = ASTSource(kernel, signature | dict.fromkeys(constants, "constexpr"), constexprs=constants)
        for capability in (80, 90):
            compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32))
            assert len(compiled.asm["cubin"]) > 0

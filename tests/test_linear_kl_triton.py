"""The Triton kernel without a GPU: in Triton's interpreter, through its compiler, and where Triton is missing."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from linear_kl_cases import random_hidden

from mrp_trainer import linear_kl

TESTS = Path(__file__).parent


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


def test_kernels_pass_in_the_interpreter():
    """Runs the "triton" cases of the other files in a process that imports triton with its interpreter."""
    pytest.importorskip("triton")
    files = [str(TESTS / name) for name in ("test_linear_kl.py", "test_linear_kl_choice.py")]
    options = ["-m", "pytest", "-q", "-p", "no:cacheprovider", *files, "-k", "triton and not cuda"]
    result = run_python(*options, TRITON_INTERPRET="1")
    assert result.returncode == 0, result.stdout + result.stderr
    passed = int(result.stdout.split(" passed")[0].split()[-1])
    assert passed >= 30, result.stdout


@pytest.mark.parametrize("choose", [False, True])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_kernel_compiles_for_gpus_that_are_not_present(dtype, choose):
    """The compiler and its assembler need no device, and reject code that only the interpreter accepts."""
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from mrp_trainer.losses.linear_kl_triton import kl_rows_kernel

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
    source = ASTSource(kl_rows_kernel, signature | dict.fromkeys(constants, "constexpr"), constexprs=constants)
    for capability in (80, 90):
        compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 8})
        assert len(compiled.asm["cubin"]) > 0


def run_python(*arguments, **environment):
    return subprocess.run(
        [sys.executable, *arguments],
        env=os.environ | environment,
        cwd=TESTS.parent,
        capture_output=True,
        text=True,
        timeout=600,
    )

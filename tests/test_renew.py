"""Renewing a result file: its own commands are run again, and it is replaced only when they succeed."""

import subprocess
import sys

import pytest

from hub_cards.build.renew import main, renew
from mrp_trainer.evaluation.results import new_result, read_result, save_result

SCRIPT = """\
import sys
from mrp_trainer.evaluation.results import write_result
status, file = int(sys.argv[1]), sys.argv[sys.argv.index("--record") + 1]
rows = [{"ratio": float(open("ratio.txt").read())}]
write_result(file, name="bench train", command="other", settings={"choice_weight": 0.5}, figures={"rows": rows})
sys.exit(status)
"""


def result_file(folder, status: int):
    (folder / "measure.py").write_text(SCRIPT)
    measure = f"{sys.executable} {folder / 'measure.py'} {status}"
    result = new_result(
        "bench train",
        command=["echo 1.25 > ratio.txt", "placeholder"],
        settings={"choice_weight": 0.0},
        figures={"rows": [{"ratio": 2.0}]},
    )
    object.__setattr__(result, "command", ("echo 1.25 > ratio.txt", measure))  # an absolute path, unlike real commands
    save_result(folder / "train.json", result)
    return folder / "train.json", result


def test_new_figures_replace_the_old_ones_and_the_commands_stay(tmp_path):
    path, old = result_file(tmp_path, status=0)
    renew(path, tmp_path / "work")
    new = read_result(path)
    assert new.rows == [{"ratio": 1.25}] and new.settings == {"choice_weight": 0.5}
    assert new.command == old.command


def test_a_command_that_fails_leaves_the_file_as_it_was(tmp_path):
    path, _ = result_file(tmp_path, status=3)
    before = path.read_bytes()
    with pytest.raises(subprocess.CalledProcessError):
        renew(path, tmp_path / "work")
    assert path.read_bytes() == before


def test_an_unknown_name_is_refused(capsys):
    with pytest.raises(SystemExit):
        main(["demo-nothing"])
    assert "unknown result 'demo-nothing'; expected one of bench-decode-code" in capsys.readouterr().err

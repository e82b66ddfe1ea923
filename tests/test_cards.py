"""Model cards."""

import pytest
import yaml

from mrp_trainer.checkpoints.cards import render_card


@pytest.mark.parametrize("layers", [0, 1, 3])
def test_a_card_has_its_values_and_valid_front_matter(tiny_model, layers):
    card = render_card(
        tiny_model(num_mrp_layers=layers), name="mine", repository="org/mine", license="apache-2.0", figures="| a |"
    )
    front_matter = yaml.safe_load(card.split("---")[1])
    assert front_matter["license"] == "apache-2.0" and front_matter["library_name"] == "transformers"
    assert 'from_pretrained("org/mine", trust_remote_code=True)' in card
    assert "$" not in card and "| a |" in card
    assert {0: "| none |", 1: "| 1 layer |", 3: "| 3 layers |"}[layers] in card
    assert ('"direct"' in card) == (layers > 0)

"""The configuration of a campaign: `schema` says what there is, `load` reads it and explains mistakes."""

from trainer.config.load import load_config, read_yaml, validate
from trainer.config.schema import CampaignConfig, as_tree

__all__ = ["CampaignConfig", "as_tree", "load_config", "read_yaml", "validate"]

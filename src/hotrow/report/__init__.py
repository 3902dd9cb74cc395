"""Pictures: pages of plotly that open anywhere, without a network. `pip install hotrow[report]` brings plotly."""

from hotrow.report.profile import draw_profile

__all__ = ["draw_profile"]

"""The explorer's page: what is chosen and changed (`state`), how it is drawn (`draw`), and the page itself (`page`)."""

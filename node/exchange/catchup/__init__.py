"""State and payloads for sites that catch up: fetching them from several donors, and being a donor."""

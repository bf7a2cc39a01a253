"""The commands of ``python -m extension``: each returns a Report, none prints."""

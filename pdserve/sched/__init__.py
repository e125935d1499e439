"""Pure policy of a worker's step: which sequences run next, on which pages. Decisions are data."""

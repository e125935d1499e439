"""The handover's two state machines (protocol.md §9). Pure: events and a time in, effects out."""

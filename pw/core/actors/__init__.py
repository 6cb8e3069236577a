"""The actor shell: messages in, state changes, messages out; mailboxes, timers, lifecycles."""

"""Why a run does not go on (`pw why`)."""

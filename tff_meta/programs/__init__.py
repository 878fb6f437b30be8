"""Our processes as TFF programs: the way into a TFF production stack."""

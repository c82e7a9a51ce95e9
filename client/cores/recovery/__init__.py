"""What happens after a core has died: suspects, blame, refusals, the limit of restarts."""

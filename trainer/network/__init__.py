"""How processes reach each other: addresses, secrets, connections and what keeps strangers out."""

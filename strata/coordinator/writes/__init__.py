"""How decisions become transactions: executed, joined with others, or under the leader's fence."""

"""How decisions become transactions: executed, coalesced with others, or under the leader's fence."""

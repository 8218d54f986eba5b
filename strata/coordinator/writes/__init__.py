"""How decisions become transactions: executed alone, coalesced with others, or under the leader's fence."""

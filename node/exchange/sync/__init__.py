"""The exchange of one sync: contributions go up to who averages them, payloads come down."""

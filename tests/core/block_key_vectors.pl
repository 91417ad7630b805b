# The block hashes of core/block_keys.py in a second language:  perl block_key_vectors.pl > block_key_vectors.json
# The tests read the JSON, so that a change to the derivation cannot change its own expectation.
use strict;
use warnings;
use Digest::SHA qw(sha256);
use JSON::PP;

sub frame { my $bytes = shift; return pack("V", length $bytes) . $bytes }

# name, namespace, salt, adapter, tokens of a block, token ids, extra bytes by depth
my @cases = (
    ["empty salt, B 16",      "\0"x16, "", "", 16, [0..31], {}],
    ["a block less one",      "\0"x16, "", "", 16, [0..14], {}],
    ["a block and one",       "\0"x16, "", "", 16, [0..16], {}],
    ["no tokens",             "\0"x16, "", "", 16, [], {}],
    ["salt",                  pack("C*",0..15), "tenant-a", "", 16, [1..32], {}],
    ["another salt",          pack("C*",0..15), "tenant-b", "", 16, [1..32], {}],
    ["salt that looks like an adapter", pack("C*",0..15), "ab", "c", 16, [1..16], {}],
    ["adapter that looks like a salt",  pack("C*",0..15), "a", "bc", 16, [1..16], {}],
    ["adapter",               pack("C*",0..15), "tenant-a", "lora-7", 16, [1..32], {}],
    ["B 64, large ids",       pack("C*",16..31), "s"x32, "", 64, [map { ($_*2654435761)%129280 } 1..200], {}],
    ["B 256",                 pack("C*",16..31), "s"x32, "", 256, [map { ($_*7919)%129280 } 1..600], {}],
    ["image across a border", pack("C*",16..31), "", "", 16, [(9)x48], {1=>"image-1 offset 8", 2=>"image-1 offset -8"}],
    ["another image there",   pack("C*",16..31), "", "", 16, [(9)x48], {1=>"image-2 offset 8", 2=>"image-2 offset -8"}],
    ["token ids past 2^31",   "\xff"x16, "\0", "\0", 4, [4294967295,2147483648,0,1], {}],
    ["block of one token",    "\xff"x16, "", "", 1, [5,5,5], {}],
);

my @vectors;
for my $case (@cases) {
    my ($name, $namespace, $salt, $adapter, $block_tokens, $token_ids, $extras) = @$case;
    my $hash = sha256("dikv" . $namespace . frame($salt) . frame($adapter));
    my ($root, @hashes) = unpack("H*", $hash);
    for my $depth (0 .. int(@$token_ids / $block_tokens) - 1) {
        my @block = @$token_ids[$depth * $block_tokens .. ($depth + 1) * $block_tokens - 1];
        $hash = sha256($hash . pack("V*", @block) . frame($extras->{$depth} // ""));
        push @hashes, unpack("H*", $hash);
    }
    push @vectors, {
        name => $name, namespace => unpack("H*", $namespace), salt => unpack("H*", $salt),
        adapter => unpack("H*", $adapter), block_tokens => $block_tokens + 0, token_ids => [map { $_ + 0 } @$token_ids],
        extras => {map { $_ => unpack("H*", $extras->{$_}) } keys %$extras}, root => $root, hashes => \@hashes,
    };
}
print "[\n", join(",\n", map { JSON::PP->new->canonical->encode($_) } @vectors), "\n]\n";

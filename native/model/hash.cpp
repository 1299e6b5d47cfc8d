#include "model/hash.h"

#include <immintrin.h>

#include <algorithm>
#include <cstring>

namespace kd::model {

namespace {

constexpr size_t kStripe = 64, kBlockStripes = 16;  // lanes are scrambled after each block
constexpr size_t kShort = 16, kMedium = 128, kLong = 240;

constexpr uint64_t kA = 0x9E3779B1u, kB = 0x85EBCA77u, kC = 0xC2B2AE3Du;  // the specification's primes of 32 bits
constexpr uint64_t kP1 = 0x9E3779B185EBCA87u, kP2 = 0xC2B2AE3D27D4EB4Fu, kP3 = 0x165667B19E3779F9u,
                   kP4 = 0x85EBCA77C2B2AE63u, kP5 = 0x27D4EB2F165667C5u;
constexpr uint64_t kMix1 = 0x165667919E3779F9u, kMix2 = 0x9FB21C651E98DF25u;

alignas(64) constexpr uint8_t kSecret[192] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c, 0xde, 0xd4,
    0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f, 0xcb, 0x79, 0xe6, 0x4e,
    0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21, 0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43,
    0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c, 0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb,
    0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3, 0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19,
    0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8, 0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7,
    0xc7, 0x0b, 0x4f, 0x1d, 0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78,
    0x73, 0x64, 0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e, 0x2b, 0x16,
    0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce, 0x45, 0xcb, 0x3a, 0x8f,
    0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

template <class T = uint64_t>
T word(const uint8_t* p) {
    T v;
    memcpy(&v, p, sizeof v);
    return v;
}
uint64_t secret(size_t at) { return word(kSecret + at); }

uint64_t fold(uint64_t a, uint64_t b) {
    const unsigned __int128 product = static_cast<unsigned __int128>(a) * b;
    return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
}
uint64_t mix(const uint8_t* p, size_t at) { return fold(word(p) ^ secret(at), word(p + 8) ^ secret(at + 8)); }

uint64_t avalanche(uint64_t h) {
    h = (h ^ (h >> 37)) * kMix1;
    return h ^ (h >> 32);
}
uint64_t avalanche_xxh64(uint64_t h) {
    h = (h ^ (h >> 33)) * kP2;
    h = (h ^ (h >> 29)) * kP3;
    return h ^ (h >> 32);
}

uint64_t hash_short(const uint8_t* p, size_t n) {
    if (n == 0) return avalanche_xxh64(secret(56) ^ secret(64));
    if (n <= 3) {
        const uint32_t all = uint32_t{p[0]} << 16 | uint32_t{p[n / 2]} << 24 | p[n - 1] | static_cast<uint32_t>(n) << 8;
        return avalanche_xxh64(all ^ (word<uint32_t>(kSecret) ^ word<uint32_t>(kSecret + 4)));
    }
    if (n <= 8) {
        const uint64_t both = word<uint32_t>(p + n - 4) + (uint64_t{word<uint32_t>(p)} << 32);
        uint64_t h = both ^ secret(8) ^ secret(16);
        h = (h ^ std::rotl(h, 49) ^ std::rotl(h, 24)) * kMix2;
        h = (h ^ ((h >> 35) + n)) * kMix2;
        return h ^ (h >> 28);
    }
    const uint64_t low = word(p) ^ secret(24) ^ secret(32), high = word(p + n - 8) ^ secret(40) ^ secret(48);
    return avalanche(n + __builtin_bswap64(low) + high + fold(low, high));
}

uint64_t hash_medium(const uint8_t* p, size_t n) {
    uint64_t sum = n * kP1;
    if (n <= kMedium) {  // pairs of 16 bytes, from both ends towards the middle
        for (size_t i = 0; i < (n + 31) / 32; ++i)
            sum += mix(p + 16 * i, 32 * i) + mix(p + n - 16 * (i + 1), 32 * i + 16);
        return avalanche(sum);
    }
    for (size_t i = 0; i < 8; ++i) sum += mix(p + 16 * i, 16 * i);
    sum = avalanche(sum);
    for (size_t i = 8; i < n / 16; ++i) sum += mix(p + 16 * i, 16 * (i - 8) + 3);
    return avalanche(sum + mix(p + n - 16, 136 - 17));
}

// lanes += n stripes of p, which use the secret from `key` on, each 8 bytes further.
void accumulate_sse2(uint64_t* lanes, const uint8_t* p, size_t n, const uint8_t* key) {
    __m128i lane[4];
    for (int i = 0; i < 4; ++i) lane[i] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(lanes) + i);
    for (; n > 0; --n, p += kStripe, key += 8) {
        for (int i = 0; i < 4; ++i) {
            const __m128i data = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p) + i);
            const __m128i keyed = _mm_xor_si128(data, _mm_loadu_si128(reinterpret_cast<const __m128i*>(key) + i));
            const __m128i product = _mm_mul_epu32(keyed, _mm_srli_epi64(keyed, 32));
            lane[i] = _mm_add_epi64(lane[i], _mm_add_epi64(product, _mm_shuffle_epi32(data, 0x4E)));
        }
    }
    for (int i = 0; i < 4; ++i) _mm_storeu_si128(reinterpret_cast<__m128i*>(lanes) + i, lane[i]);
}

__attribute__((target("avx2"))) void accumulate_avx2(uint64_t* lanes, const uint8_t* p, size_t n, const uint8_t* key) {
    __m256i lane[2];
    for (int i = 0; i < 2; ++i) lane[i] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(lanes) + i);
    for (; n > 0; --n, p += kStripe, key += 8) {
        for (int i = 0; i < 2; ++i) {
            const __m256i data = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p) + i);
            const __m256i keyed = _mm256_xor_si256(data, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(key) + i));
            const __m256i product = _mm256_mul_epu32(keyed, _mm256_srli_epi64(keyed, 32));
            lane[i] = _mm256_add_epi64(lane[i], _mm256_add_epi64(product, _mm256_shuffle_epi32(data, 0x4E)));
        }
    }
    for (int i = 0; i < 2; ++i) _mm256_storeu_si256(reinterpret_cast<__m256i*>(lanes) + i, lane[i]);
}

const auto accumulate = __builtin_cpu_supports("avx2") ? accumulate_avx2 : accumulate_sse2;

void scramble(uint64_t* lanes) {
    for (size_t i = 0; i < 8; ++i)
        lanes[i] = (lanes[i] ^ (lanes[i] >> 47) ^ secret(sizeof kSecret - kStripe + 8 * i)) * kA;
}

}  // namespace

Hash::Hash() : lane_{kC, kP1, kP2, kP3, kP4, kB, kP5, kA} {}

void Hash::stripes(const uint8_t* p, size_t n) {
    while (n > 0) {
        const size_t some = std::min(n, kBlockStripes - stripe_);
        accumulate(lane_, p, some, kSecret + 8 * stripe_);
        p += some * kStripe, n -= some, stripe_ += some;
        if (stripe_ == kBlockStripes) scramble(lane_), stripe_ = 0;
    }
}

void Hash::add(const void* data, size_t bytes) {
    const auto* p = static_cast<const uint8_t*>(data);
    total_ += bytes;
    if (held_ + bytes > kHold) {
        if (held_ > 0) {
            const size_t n = kHold - held_;
            memcpy(hold_ + held_, p, n);
            stripes(hold_, kHold / kStripe);
            held_ = 0, p += n, bytes -= n;
        }
        if (bytes >
            kHold) {  // the last byte of all is never in a stripe yet: value() makes the last stripe of what it ends
            const size_t n = (bytes - 1) / kStripe;
            stripes(p, n);
            p += n * kStripe, bytes -= n * kStripe;
            memcpy(hold_ + kHold - kStripe, p - kStripe, kStripe);
        }
    }
    if (bytes != 0) memcpy(hold_ + held_, p, bytes);
    held_ += bytes;
}

uint64_t Hash::value() const {
    if (total_ <= kShort) return hash_short(hold_, held_);
    if (total_ <= kLong) return hash_medium(hold_, held_);
    Hash end = *this;
    end.stripes(hold_, (held_ - 1) / kStripe);
    uint8_t last[kStripe];  // the last 64 bytes of all
    const size_t here = std::min(held_, kStripe), before = kStripe - here;
    memcpy(last, hold_ + kHold - before, before);
    memcpy(last + before, hold_ + held_ - here, here);
    accumulate(end.lane_, last, 1, kSecret + sizeof kSecret - kStripe - 7);
    uint64_t h = total_ * kP1;
    for (size_t i = 0; i < kLanes; i += 2)
        h += fold(end.lane_[i] ^ secret(11 + 8 * i), end.lane_[i + 1] ^ secret(11 + 8 * i + 8));
    return avalanche(h);
}

}  // namespace kd::model

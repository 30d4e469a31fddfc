#include "network/sealing.h"

#include <cstring>
#include <optional>

#include "base/dynlib.h"
#include "base/error.h"
#include "base/sha256.h"

namespace ringtrain {
namespace {

using Context = evp_cipher_ctx_st;
struct Cipher;  // EVP_CIPHER
struct Engine;  // ENGINE

// Of <openssl/evp.h>: the same in 1.1 and 3.
constexpr int kGetTag = 0x10, kSetTag = 0x11;

struct LibCrypto {
  Context* (*context_new)();
  void (*context_free)(Context*);
  const Cipher* (*aes_256_gcm)();
  int (*control)(Context*, int what, int number, void* value);
  using Init = int(Context*, const Cipher*, Engine*, const uint8_t* key, const uint8_t* nonce);
  using Update = int(Context*, uint8_t* to, int* bytes, const uint8_t* from, int from_bytes);
  using Final = int(Context*, uint8_t* to, int* bytes);
  Init *seal_init, *open_init;
  Update *seal_update, *open_update;
  Final *seal_final, *open_final;
};

DynamicLibrary open_library() {
  for (const char* name : {"libcrypto.so.3", "libcrypto.so.1.1", "libcrypto.so"}) {
    try {
      return DynamicLibrary(name);
    } catch (const Error&) {  // another name
    }
  }
  throw failure(
      "socket_encryption=on needs OpenSSL's libcrypto, and this process finds none: install libssl3 (Debian, Ubuntu), "
      "openssl-libs (Fedora, RHEL) or openssl (conda), or let LD_LIBRARY_PATH lead to it");
}

LibCrypto load() {
  const DynamicLibrary library = open_library();
  LibCrypto crypto;
  library.find(crypto.context_new, "EVP_CIPHER_CTX_new");
  library.find(crypto.context_free, "EVP_CIPHER_CTX_free");
  library.find(crypto.aes_256_gcm, "EVP_aes_256_gcm");
  library.find(crypto.control, "EVP_CIPHER_CTX_ctrl");
  library.find(crypto.seal_init, "EVP_EncryptInit_ex");
  library.find(crypto.open_init, "EVP_DecryptInit_ex");
  library.find(crypto.seal_update, "EVP_EncryptUpdate");
  library.find(crypto.open_update, "EVP_DecryptUpdate");
  library.find(crypto.seal_final, "EVP_EncryptFinal_ex");
  library.find(crypto.open_final, "EVP_DecryptFinal_ex");
  return crypto;
}

const LibCrypto& libcrypto() {
  static const LibCrypto crypto = load();
  return crypto;
}

void require_done(int code) {
  if (code != 1) throw failure("libcrypto cannot encrypt with AES-256-GCM");
}

// HKDF for one block. `of_whom`: for the bytes of that side.
std::string key_of(const std::string& secret, const std::string& said, const char* of_whom) {
  const Sha256 extracted = hmac_sha256(said, secret);
  const Sha256 key = hmac_sha256({extracted.begin(), extracted.end()}, std::string("ringtrain ") + of_whom + '\x01');
  return {key.begin(), key.end()};
}

const uint8_t* bytes_of(const char* data) { return reinterpret_cast<const uint8_t*>(data); }
uint8_t* bytes_of(char* data) { return reinterpret_cast<uint8_t*>(data); }

}  // namespace

void Sealing::require() { libcrypto(); }

void Sealing::Way::Free::operator()(Context* context) const { libcrypto().context_free(context); }

Sealing::Way::Way(const std::string& key, bool seals) : context(libcrypto().context_new()) {
  if (!context) throw std::bad_alloc();
  const auto& init = seals ? libcrypto().seal_init : libcrypto().open_init;
  require_done(init(context.get(), libcrypto().aes_256_gcm(), nullptr, bytes_of(key.data()), nullptr));
}

std::array<uint8_t, 12> Sealing::Way::next_nonce() {
  std::array<uint8_t, 12> nonce = {};
  for (size_t i = 0; i < sizeof(records); ++i) nonce[nonce.size() - 1 - i] = static_cast<uint8_t>(records >> 8 * i);
  ++records;
  return nonce;
}

Sealing::Sealing(const std::string& secret, const std::string& said, bool dials)
    : out_(key_of(secret, said, dials ? "dials" : "answers"), true),
      in_(key_of(secret, said, dials ? "answers" : "dials"), false) {}

size_t Sealing::seal(const iovec* parts, size_t count, size_t bytes, char* record) {
  const LibCrypto& crypto = libcrypto();
  Context* context = out_.context.get();
  const uint32_t head[] = {static_cast<uint32_t>(bytes), ~static_cast<uint32_t>(bytes)};
  std::memcpy(record, head, kHeadBytes);
  int done = 0;
  require_done(crypto.seal_init(context, nullptr, nullptr, nullptr, out_.next_nonce().data()));
  require_done(crypto.seal_update(context, nullptr, &done, bytes_of(record), kHeadBytes));
  char* end = record + kHeadBytes;
  for (size_t i = 0; i < count; ++i) {
    const auto* part = static_cast<const uint8_t*>(parts[i].iov_base);
    require_done(crypto.seal_update(context, bytes_of(end), &done, part, static_cast<int>(parts[i].iov_len)));
    end += parts[i].iov_len;
  }
  require_done(crypto.seal_final(context, bytes_of(end), &done));
  require_done(crypto.control(context, kGetTag, kTagBytes, end));
  return kHeadBytes + bytes + kTagBytes;
}

size_t Sealing::text_bytes(const char* record) {
  uint32_t head[2];
  std::memcpy(head, record, kHeadBytes);
  return head[0] == ~head[1] && head[0] <= kMostText ? head[0] : 0;
}

bool Sealing::open(const char* record, size_t bytes, char* text) {
  const LibCrypto& crypto = libcrypto();
  Context* context = in_.context.get();
  const char* sealed = record + kHeadBytes;
  std::array<char, kTagBytes> tag;
  std::memcpy(tag.data(), sealed + bytes, kTagBytes);
  int done = 0;
  require_done(crypto.open_init(context, nullptr, nullptr, nullptr, in_.next_nonce().data()));
  require_done(crypto.open_update(context, nullptr, &done, bytes_of(record), kHeadBytes));
  require_done(crypto.open_update(context, bytes_of(text), &done, bytes_of(sealed), static_cast<int>(bytes)));
  require_done(crypto.control(context, kSetTag, kTagBytes, tag.data()));
  return crypto.open_final(context, bytes_of(text) + bytes, &done) == 1;
}

}  // namespace ringtrain

// A strict reader of JSON (RFC 8259) for input nobody vouches for.
//
// Stricter than the RFC: the text is UTF-8 without a byte order mark, an object's keys are distinct, integers fit
// int64, other numbers fit a finite double, strings hold no zero character and no lone surrogate, nesting stops at
// kMaxDepth. All failures are Error(KD_E_MODEL) with the byte offset. Nothing is allocated that the text has not paid
// for: memory is at most a constant times the text's size.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_set>
#include <utility>
#include <vector>

#include "error.h"

namespace kd::json {

constexpr int kMaxDepth = 32;
constexpr size_t kMaxNumberBytes = 64;

enum class Kind { null, boolean, integer, real, string, array, object };

const char* kind_name(Kind kind);  // "a string", "an object", ...

// Reads one text front to back. `text` must outlive it; `where` names it in sentences (a file's path).
class Cursor {
  public:
    Cursor(std::string_view text, std::string where);

    Kind peek();  // of the value that comes next; `integer` for every number
    void null();
    bool boolean();
    std::string string();
    int64_t integer();  // fails on a number with a fraction or an exponent

    struct Number {
        bool is_integer = false;
        int64_t integer = 0;
        double real = 0;
    };
    Number number();

    // member(key) is called for every member and must consume its value.
    template <class F>
    void object(F&& member) {
        enter(Kind::object);
        const std::string*& name = keys_[depth_ - 1];
        std::unordered_set<std::string> seen;
        for (bool first = true; !leave('}', first); first = false) {
            const size_t at = next_;
            const auto [key, fresh] = seen.insert(string());
            if (!fresh) error(at, "key '" + *key + "' appears twice");
            name = &*key;
            colon();
            member(*key);
            name = nullptr;
        }
    }

    // element() is called before every element and must consume it.
    template <class F>
    void array(F&& element) {
        enter(Kind::array);
        for (bool first = true; !leave(']', first); first = false) element();
    }

    void skip();  // any value, checked like every other
    void end();   // nothing but white space is left

    size_t offset() const { return next_; }
    [[noreturn]] void error(size_t offset, const std::string& what) const;

  private:
    void space();
    void expect(Kind kind);
    void enter(Kind kind);
    bool leave(char bracket, bool first);
    void colon();
    void word(const char* text);
    uint32_t hex4();
    void escape(std::string& to);
    void utf8(std::string& to);

    std::string_view text_;
    std::string where_;
    size_t next_ = 0;
    int depth_ = 0;
    const std::string* keys_[kMaxDepth] = {};  // of the members that are being read, for sentences; null in arrays
};

// A whole text as a tree, for small files such as config.json.
struct Member;
struct Value {
    Kind kind = Kind::null;
    bool boolean = false;
    int64_t integer = 0;
    double real = 0;  // of an integer, too
    std::string string;
    std::vector<Value> array;
    std::vector<Member> object;  // in the text's order

    const Value* find(std::string_view key) const;  // null pointer: no such member, or no object
    bool is_null() const { return kind == Kind::null; }
    bool is_number() const { return kind == Kind::integer || kind == Kind::real; }
};

struct Member {
    std::string name;
    Value value;
};

Value parse(std::string_view text, const std::string& where);

}  // namespace kd::json

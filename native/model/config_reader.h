// Reads the members of one object of a config and remembers which; afterwards the rest is judged by name.
#pragma once

#include <string>
#include <string_view>
#include <unordered_set>

#include "model/config.h"
#include "model/json.h"

namespace kd::model {

class Reader {
  public:
    // `name` is the object's path in the file with a dot behind it, e.g. "text_config.", or empty.
    Reader(const json::Value& object, std::string where, std::string name);

    // A member, marked as read. Null pointer: missing or null.
    const json::Value* find(const char* key);

    int integer(const char* key, int64_t least, int64_t most);
    int integer_or(const char* key, int64_t missing, int64_t least, int64_t most);
    double number(const char* key, double least, double most);
    double number_or(const char* key, double missing, double least, double most);
    bool boolean(const char* key);
    bool boolean_or(const char* key, bool missing);
    std::string string(const char* key);
    std::string string_or(const char* key, const char* missing);
    std::vector<int32_t> ids_or_none(const char* key, int64_t vocab);  // an integer, a list of them, or nothing

    // Refused unless missing, null or equal.
    void must_be(const char* key, const char* value);
    void must_be(const char* key, int64_t value);
    void must_be(const char* key, bool value);
    void must_be_off(const char* key);  // missing, null, false, 0, "" or empty

    const json::Value& object(const char* key);  // must be there

    // Every member not read: refused if its name says that it changes the arithmetic and it is not off.
    void judge_rest(bool refuse_all = false) const;

    const std::string& where() const { return where_; }
    std::string path(const char* key) const { return name_ + key; }
    [[noreturn]] void wrong(const char* key, const std::string& what) const;  // "<where>: <name><key> <what>"

  private:
    const json::Value& need(const char* key);
    int checked_integer(const char* key, const json::Value& v, int64_t least, int64_t most) const;
    double checked_number(const char* key, const json::Value& v, double least, double most) const;

    const json::Value& object_;
    std::string where_;
    std::string name_;
    std::unordered_set<std::string> read_;
};

// As it would be written, cut short: for sentences.
std::string spelled(const json::Value& value);

// rope_theta with rope_scaling (transformers 4), or rope_parameters (transformers 5).
Rotary read_rotary(Reader& config, bool deepseek_yarn_allowed);

}  // namespace kd::model
